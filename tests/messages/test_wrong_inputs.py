"""Each message names the file and the line, or the option, and a fix that works when it is typed."""

from __future__ import annotations

import difflib
from pathlib import Path

import pytest

from pdserve.errors import RecipeError
from pdserve.reach.cluster_file import load_cluster
from tests.messages.fixes import applied
from tests.messages.kit import Case, run, write
from tests.messages.table import CASES, GOLDEN, message, text

CASE = pytest.mark.parametrize("case", CASES, ids=lambda case: case.title.replace(" ", "-"))
_USAGE = ("`", "give one of", "belongs to", "Did you mean", "Possible options", "Missing arg", "unexpected extra arg")
"""The last four are of the command line's own parser, whose usage line says what is wanted."""


def test_the_whole_messages_are_those_of_the_golden_file() -> None:
    diff = difflib.unified_diff(GOLDEN.read_text().splitlines(), text().splitlines(), "golden", "now", lineterm="", n=6)
    assert not list(diff), "if the messages are meant: python -m tests.regenerate, and read the diff"


def test_there_are_many_and_no_two_have_one_name() -> None:
    assert len(CASES) >= 150
    assert len({case.title for case in CASES}) == len(CASES)


@CASE
def test_a_message_says_what_to_do(case: Case) -> None:
    shown = message(case)
    problems = [line for line in shown.splitlines() if line.startswith("  | ")]
    if shown.partition("\n")[0].endswith(" problems"):
        assert all(" -> " in line for line in problems), shown
    elif shown.startswith("Usage:"):
        assert any(words in shown for words in _USAGE), shown
    else:
        assert "  what to do:   " in shown, shown


@CASE
def test_what_the_message_says_works_when_it_is_typed(case: Case, tmp_path: Path) -> None:
    after = applied(case, message(case)) if case.fixed is None else case.fixed
    assert after is not None, f"no program can carry this out: give the case `fixed`\n{message(case)}"
    write(after, tmp_path)
    if "cluster.yaml" in after.files:
        _accepted(tmp_path / "cluster.yaml", after)
    else:
        done = run(after.argv, tmp_path, after.environ)
        assert done.code == 0, f"{after}\n{done.err}"


def _accepted(path: Path, after: Case) -> None:
    try:
        load_cluster(path, environ=after.environ)
    except RecipeError as error:
        pytest.fail(f"{after}\n{error.render()}")
