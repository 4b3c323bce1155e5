"""Every shipped recipe renders to exactly the files of tests/golden (python -m tests.plan.regenerate writes them)."""

from __future__ import annotations

import subprocess

import pytest

from pdserve.errors import PreflightError
from pdserve.plan.build import build_plan
from pdserve.plan.model import Plan
from pdserve.recipe.load.loader import load_recipe
from tests.plan.golden import FOLDER, RECIPES, ROOT, golden_files, shipped_plan
from tests.plan.kit import VERSIONS, hosts


def test_there_are_shipped_recipes() -> None:
    assert {"tiny-cpu", "tiny-cpu-2p2d", "kimi-mi355x", "kimi-mi355x-2node", "kimi-mi355x-lmcache"} <= set(RECIPES)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_plans_and_renders_to_its_golden_files(name: str) -> None:
    for path, text in golden_files(name).items():
        assert path.read_text() == text, f"{path.name} differs; python -m tests.plan.regenerate, and read the diff"


def test_no_golden_file_is_left_of_a_recipe_that_is_gone() -> None:
    assert {path.name.partition(".")[0] for path in FOLDER.iterdir()} == set(RECIPES)


@pytest.mark.process
@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("suffix", ["sh", "sbatch"])
def test_what_is_rendered_is_valid_bash(name: str, suffix: str) -> None:
    subprocess.run(["bash", "-n", FOLDER / f"{name}.{suffix}"], check=True)


@pytest.mark.parametrize("name", RECIPES)
def test_the_plan_survives_json(name: str) -> None:
    plan = shipped_plan(name)
    assert Plan.model_validate_json(plan.model_dump_json()) == plan


def test_the_two_node_recipe_on_one_host_shows_the_sum_and_what_to_type() -> None:
    file = "recipes/kimi-mi355x-2node.yaml"
    recipe = load_recipe(ROOT / file, environ={}).recipe
    with pytest.raises(PreflightError) as caught:
        build_plan(recipe, hosts(8), run_dir="r", run_id="r", versions=VERSIONS, recipe_file=file)
    assert caught.value.exit_code == 3
    assert caught.value.what == "prefill 1 x 8 + decode 1 x 8 = 16 devices; this host has 8 (0-7)"
    assert "pdserve up recipes/kimi-mi355x-2node.yaml --set prefill.parallel.tp=4 --set decode.parallel.tp=4" in (
        caught.value.todo or ""
    )
    assert "--set prefill.parallel.tp=4 --set decode.parallel.tp=4" in (caught.value.todo or "")


def test_a_recipes_file_is_named_after_it() -> None:
    """So that a run is found by the name of the file that was started."""
    for name in RECIPES:
        assert shipped_plan(name).name == name
