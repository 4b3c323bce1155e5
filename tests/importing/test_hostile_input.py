"""Odd input of an import is refused, or asked for by name; it is never a traceback."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdserve.errors import RecipeError
from pdserve.importing.launch import ImportChoice
from pdserve.importing.yaml_tree import read
from pdserve.operations.import_recipe import import_file
from tests.importing import kit


def test_a_character_that_yaml_forbids_is_refused() -> None:
    with pytest.raises(RecipeError, match="not YAML"):
        read("a: 1\n\0", "file.yaml")


def test_a_file_that_is_nested_too_deeply_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "launch.yaml"
    file.write_text("name: a\nbackend: " + "{a: " * 3000 + "1" + "}" * 3000)
    with pytest.raises(RecipeError, match=r"nested too deeply|not YAML"):
        import_file(file, ImportChoice())


def test_a_setup_script_that_is_no_file_name_is_not_repeated() -> None:
    draft = kit.read(kit.SCHEMA_1 + "setup_script: 'curl -H \"Authorization: Bearer hunter2\" x'\n")
    (why,) = [text for name, text in kit.notes(draft, "served").items() if "setup" in name]
    assert "hunter2" not in why
    assert "setup: [[bash, /configs/FILE]]" in why
