"""One wrong input of each kind, and its message."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path

from tests.messages import wrong_keys, wrong_together, wrong_values, wrong_yaml
from tests.messages.kit import Case, run, write

KINDS: tuple[tuple[Case, ...], ...] = (*wrong_values.KINDS, *wrong_keys.KINDS, *wrong_yaml.KINDS, *wrong_together.KINDS)
CASES = tuple(case for kind in KINDS for case in kind)


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
