"""A recipe with `container:` on this machine is not run beside its container."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pdserve.operations.look import choose_destination
from pdserve.plan.node import Local
from pdserve.reach.candidates import in_containers
from pdserve.recipe.load.loader import LoadedRecipe, load_recipe
from tests.launch.deployment import recipe


def loaded(folder: Path, **changes: Any) -> LoadedRecipe:
    return load_recipe(recipe(folder, **changes), environ={})


def test_without_a_container_this_machine_is_looked_at_from_here(tmp_path: Path) -> None:
    assert choose_destination(loaded(tmp_path), None, this_machine=True, words=()).machines is None


def test_with_one_its_agent_and_what_looks_for_it_are_inside(tmp_path: Path) -> None:
    boxed = loaded(tmp_path, container={"kind": "docker", "image": "vllm:1"})
    machines = choose_destination(boxed, None, this_machine=True, words=()).machines
    assert machines is not None
    assert machines.job is None
    there = in_containers(machines, boxed.recipe, run_id="r", run_dir="/runs/r", recipe_dir="/recipes", store="/i")
    (machine,) = there.machines
    assert machine.reach == Local()
    assert machine.command[:2] == ("docker", "run")
    assert machine.command[-1] == "python3"
