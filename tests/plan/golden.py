"""The plan and the rendered script of every shipped recipe, with everything that varies held still."""

from __future__ import annotations

from pathlib import Path

from pdserve.plan.build import build_plan, nodes_for
from pdserve.plan.model import Plan
from pdserve.plan.render import render_shell
from pdserve.recipe.loader import load_recipe
from tests.plan.kit import VERSIONS

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "tests" / "golden"
RECIPES = tuple(sorted(path.stem for path in (ROOT / "recipes").glob("*.yaml")))


def shipped_plan(name: str) -> Plan:
    """The plan of a shipped recipe for nodes of its own kind."""
    recipe = load_recipe(ROOT / "recipes" / f"{name}.yaml", environ={}).recipe
    return build_plan(
        recipe,
        nodes_for(recipe),
        run_dir=f"/run/pdserve/{name}",
        run_id="golden",
        versions=VERSIONS,
        python="python",
        recipe_dir="/opt/pdserve/recipes",
    )


def golden_files(name: str) -> dict[Path, str]:
    """Path -> what it must contain."""
    plan = shipped_plan(name)
    return {
        FOLDER / f"{name}.plan.json": plan.model_dump_json(indent=2) + "\n",
        FOLDER / f"{name}.sh": render_shell(plan),
    }
