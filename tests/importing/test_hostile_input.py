"""Odd input of an import is refused, or asked for by name; it is never a traceback."""

from __future__ import annotations

import pytest

from pdserve.errors import RecipeError
from pdserve.importing.shell.lines import SUM, SUM_END
from pdserve.importing.shell.values import UnknownValueError, Variables, expanded, holds
from pdserve.importing.yaml_tree import read


def test_a_character_that_yaml_forbids_is_refused() -> None:
    with pytest.raises(RecipeError, match="not YAML"):
        read("a: 1\n\0", "file.yaml")


def test_a_test_of_what_is_no_number_is_not_known() -> None:
    assert holds(["[", "--5", "-eq", "5", "]"], Variables({})) is None


@pytest.mark.parametrize("value", ["9" * 5000, "9" * 18])
def test_a_sum_beyond_what_a_shell_counts_is_not_known(value: str) -> None:
    with pytest.raises(UnknownValueError):
        list(expanded([f"{SUM}A*A{SUM_END}"], Variables({"A": value})))
