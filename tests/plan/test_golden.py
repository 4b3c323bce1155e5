"""Shipped recipes, and layouts that none of them has, plan to their golden files (python -m tests.plan.regenerate)."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.plan import container_golden, shapes
from tests.plan.golden import FOLDER, RECIPES, golden_files, shipped_plan
from tests.tables import each_row


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_plans_and_renders_to_its_golden_files(name: str) -> None:
    assert shipped_plan(name).name == name, "a run is found by the name of the file that was started"
    assert_golden(golden_files(name))


def test_layouts_and_containers_have_their_golden_files() -> None:
    assert_golden({**shapes.golden_files(), **container_golden.golden_files()})


def assert_golden(files: Mapping[Path, str]) -> None:
    for path, text in files.items():
        assert path.read_text() == text, f"{path.name} differs; python -m tests.plan.regenerate, and read the diff"


def test_no_golden_file_is_left_of_what_is_gone() -> None:
    assert {path.name.partition(".")[0] for path in FOLDER.iterdir()} == set(RECIPES)
    for made in (shapes, container_golden):
        assert {*made.FOLDER.iterdir()} == {*made.golden_files()}


@pytest.mark.process
@each_row("path", sorted(path for path in FOLDER.iterdir() if path.suffix != ".json"))
def test_what_is_rendered_is_valid_bash(path: Path) -> None:
    subprocess.run(["bash", "-n", path], check=True)
