"""Odd input of an import is refused, or asked for by name; it is never a traceback."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdserve.errors import RecipeError
from pdserve.importing.choice import ImportChoice
from pdserve.importing.shell.lines import SUM, SUM_END
from pdserve.importing.shell.values import UnknownValueError, Variables, expanded, holds
from pdserve.importing.yaml_tree import read
from pdserve.operations.import_recipe import import_file
from tests.importing import kit


def test_a_character_that_yaml_forbids_is_refused() -> None:
    with pytest.raises(RecipeError, match="not YAML"):
        read("a: 1\n\0", "file.yaml")


def test_a_test_of_what_is_no_number_is_not_known() -> None:
    assert holds(["[", "--5", "-eq", "5", "]"], Variables({})) is None


@pytest.mark.parametrize("value", ["9" * 5000, "9" * 18])
def test_a_sum_beyond_what_a_shell_counts_is_not_known(value: str) -> None:
    with pytest.raises(UnknownValueError):
        list(expanded([f"{SUM}A*A{SUM_END}"], Variables({"A": value})))


def test_a_value_that_doubles_itself_is_not_known() -> None:
    text = "A=xxxxxxxx\n" + "A=$A$A\n" * 40 + "vllm serve org/model --served-model-name $A\n"
    assert "A" in kit.refused(text).render()


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
