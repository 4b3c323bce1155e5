"""The cgroup of the tests of this process alone, in which their agents make theirs: what is left there is of a test.

Ours: no plugin of pytest knows of cgroups.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pdserve.system import cgroup
from pdserve.system.cgroup import Cgroup

_PREFIX = "pdserve-tests-"
_own: Path | None = None


@contextmanager
def separate() -> Iterator[None]:
    """This process, and what it starts from now on, is in a cgroup of its own, if one can be made."""
    global _own
    try:
        home, _ = cgroup.place()
        for old in home.glob(f"{_PREFIX}*"):  # of a test process that was killed
            if not Path("/proc", old.name.removeprefix(_PREFIX)).exists():
                Cgroup.at(old).remove()
        made = home / f"{_PREFIX}{os.getpid()}"
        made.mkdir()
        _enter(made)
    except OSError:
        yield
        return
    _own = made
    try:
        yield
    finally:
        _enter(home)
        Cgroup.at(made).remove()


def made_inside() -> set[str]:
    """Names of the cgroups that agents of tests have made and that are still there."""
    return set() if _own is None else {each.name for each in _own.iterdir() if each.is_dir()}


def lost(node: str) -> bool:
    """A node that loses its power takes its cgroups along; those of a test's node are this machine's. True once all of
    them are gone."""
    return _own is None or all(Cgroup.at(each).remove() for each in _own.glob(f"pdserve-*@{node}-*"))


def _enter(folder: Path) -> None:
    (folder / "cgroup.procs").write_bytes(b"0")
