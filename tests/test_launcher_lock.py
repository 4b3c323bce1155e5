"""The lock of a deployment: no other user can hold it, and a process that does is named with the way out."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pdserve.errors import StateError
from pdserve.run.directory import RunDir, check_no_launcher

STRANGER = 4242
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")
HOLDS = """
import fcntl, os, signal, sys
os.setuid(int(sys.argv[1]))
fcntl.flock(0, fcntl.LOCK_EX)
print(flush=True)
signal.pause()
"""


@contextmanager
def holder(file: Path, uid: int) -> Iterator[int]:
    """The PID of a process that holds a lock which it can only read."""
    with (
        file.open("rb") as opened,
        subprocess.Popen([sys.executable, "-c", HOLDS, str(uid)], stdin=opened, stdout=subprocess.PIPE) as process,
    ):
        assert process.stdout is not None
        process.stdout.readline()
        yield process.pid
        process.kill()


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path, "fake", "run-1")


def lock(run: RunDir) -> Path:
    return run.path.parent / "lock"


def test_no_other_user_can_open_it_also_where_an_earlier_version_left_it_open(run: RunDir) -> None:
    with run.only_launcher():
        assert lock(run).stat().st_mode & 0o777 == 0o600
    lock(run).chmod(0o644)
    with run.only_launcher():
        assert lock(run).stat().st_mode & 0o777 == 0o600


@pytest.mark.process
def test_who_holds_it_is_named(run: RunDir) -> None:
    lock(run).touch()
    with holder(lock(run), os.geteuid()) as pid:
        with pytest.raises(StateError, match="another pdserve up") as refused:
            check_no_launcher(run.path.parent.parent, "fake")
        with pytest.raises(StateError, match="another pdserve up"), run.only_launcher():
            raise AssertionError("two hold one lock")
    assert f"PID {pid} ({sys.executable} -c" in str(refused.value.cause)
    check_no_launcher(run.path.parent.parent, "fake")


@pytest.mark.process
@as_root
def test_another_user_who_holds_it_is_named_with_the_way_out(run: RunDir) -> None:
    lock(run).touch()
    lock(run).chmod(0o644)
    with holder(lock(run), STRANGER) as pid, pytest.raises(StateError, match="held by another user") as refused:
        check_no_launcher(run.path.parent.parent, "fake")
    assert f"of uid {STRANGER} holds the lock" in str(refused.value.cause)
    assert f"have uid {STRANGER} or root end PID {pid}" in str(refused.value.todo)


def test_a_look_makes_no_lock(tmp_path: Path) -> None:
    check_no_launcher(tmp_path, "fake")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("there", ["a link", "a folder"])
def test_what_is_no_lock_is_not_followed_and_reported(run: RunDir, tmp_path: Path, there: str) -> None:
    if there == "a link":
        (tmp_path / "precious").touch()
        lock(run).symlink_to(tmp_path / "precious")
    else:
        lock(run).mkdir()
    with pytest.raises(StateError, match="cannot be opened") as refused, run.only_launcher():
        raise AssertionError("it is held")
    assert refused.value.where == str(lock(run))
