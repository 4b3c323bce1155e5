"""The plan and the rendered script of every shipped recipe, with everything that varies held still."""

from __future__ import annotations

from pathlib import Path

from pdserve.plan.bash import render_shell
from pdserve.plan.build import build_plan
from pdserve.plan.model import Plan
from pdserve.plan.placement import nodes_for
from pdserve.plan.sbatch import render_sbatch
from pdserve.recipe.load.loader import load_recipe
from pdserve.recipe.model import Recipe
from tests.plan.kit import VERSIONS

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "tests" / "golden"
RECIPES = tuple(sorted(path.stem for path in (ROOT / "recipes").glob("*.yaml")))


def shipped(name: str) -> Recipe:
    """A shipped recipe."""
    return load_recipe(ROOT / "recipes" / f"{name}.yaml", environ={}).recipe


def shipped_plan(name: str) -> Plan:
    """The plan of a shipped recipe for nodes of its own kind."""
    recipe = shipped(name)
    return build_plan(
        recipe,
        nodes_for(recipe),
        run_dir=f"/run/pdserve/{name}",
        run_id="golden",
        versions=VERSIONS,
        python="python",
        recipe_dir="/opt/pdserve/recipes",
    )


BATCH_SCRIPT = ROOT / "slurm" / "disagg.sh"


def batch_script() -> str:
    """What slurm/disagg.sh must contain."""
    name = "kimi-mi355x-2node"
    return render_sbatch(shipped(name), shipped_plan(name), [f"recipes/{name}.yaml"], script="slurm/disagg.sh")


def golden_files(name: str) -> dict[Path, str]:
    """Path -> what it must contain."""
    plan = shipped_plan(name)
    return {
        FOLDER / f"{name}.plan.json": plan.model_dump_json(indent=2) + "\n",
        FOLDER / f"{name}.sh": render_shell(plan),
        FOLDER / f"{name}.sbatch": render_sbatch(shipped(name), plan, [f"recipes/{name}.yaml"]),
    }
