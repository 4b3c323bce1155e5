"""Each message says what to do, and where a program can read the fix out of it, the fix works."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path

from pdserve.reach.cluster_file import load_cluster
from tests.messages.fixes import applied
from tests.messages.kit import Case, run, write
from tests.messages.wrong_inputs import CASES
from tests.tables import each_row

_USAGE = ("`", "give one of", "belongs to", "Did you mean", "Possible options", "Missing arg", "unexpected extra arg")
"""The last four are of the command line's own parser, whose usage line says what is wanted."""


def message(case: Case) -> str:
    """What the command of the case writes to stderr, with paths as they are typed."""
    return _message_of(case.title)


@cache
def _message_of(title: str) -> str:
    """By title: a case cannot be hashed, and no two have one title."""
    [case] = (case for case in CASES if case.title == title)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        write(case, folder)
        return run(case.argv, folder, case.environ).err.replace(f"{folder}/", "")


@each_row("case", CASES)
def test_a_message_has_its_fact_and_what_to_do(case: Case) -> None:
    shown = message(case)
    assert case.fact in shown
    problems = [line for line in shown.splitlines() if line.startswith("  | ")]
    if shown.partition("\n")[0].endswith(" problems"):
        assert all(" -> " in line for line in problems), shown
    elif shown.startswith("Usage:"):
        assert any(words in shown for words in _USAGE), shown
    else:
        assert "  what to do:   " in shown, shown


@each_row("case", [case for case in CASES if not case.fact])
def test_what_the_message_says_works_when_it_is_typed(case: Case, tmp_path: Path) -> None:
    after = applied(case, message(case))
    assert after is not None, f"no program can read the fix any more\n{message(case)}"
    write(after, tmp_path)
    if "cluster.yaml" in after.files:
        assert load_cluster(tmp_path / "cluster.yaml", environ=after.environ).cluster.hosts
    else:
        done = run(after.argv, tmp_path, after.environ)
        assert done.code == 0, f"{after}\n{done.err}"
