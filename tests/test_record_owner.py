"""A record says which processes are killed: one that another user may have written is not obeyed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pdserve.errors import NotOursError, StateError
from pdserve.run.directory import RunDir, check_no_launcher, find
from pdserve.run.state import NodeState
from pdserve.system import procfs
from tests.launch.deployment import PDSERVE, execute
from tests.launch.records import GONE, HERE, recorded_state, write_record

pytestmark = pytest.mark.process

STRANGER = 4242
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")


@pytest.fixture
def bystander() -> Iterator[subprocess.Popen[bytes]]:
    """A process that pdserve never started."""
    with subprocess.Popen(["sleep", "1000"]) as process:
        yield process
        process.kill()


@pytest.fixture
def run(tmp_path: Path, bystander: subprocess.Popen[bytes]) -> RunDir:
    """Its state names the bystander as the agent."""
    [agent] = procfs.identities([bystander.pid])
    state = recorded_state(nodes={"n": NodeState(agent=agent, guard=GONE, hostname=HERE)})
    return write_record(RunDir.create(tmp_path / "home", "fake", "run-1"), state)


def pdserve(run: RunDir, *arguments: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
    return execute(*PDSERVE, *arguments, env={"PDSERVE_HOME": str(run.path.parent.parent), **env})


def open_file(run: RunDir) -> Path:
    run.path.chmod(0o755)
    run.state.chmod(0o666)
    return run.state


def open_run(run: RunDir) -> Path:
    run.path.chmod(0o770)
    return run.path


def open_deployment(run: RunDir) -> Path:
    run.path.parent.chmod(0o777)
    return run.path.parent


def linked_from_an_open_folder(run: RunDir) -> Path:
    """Another user makes `current` lead to a folder of ours that is from that user, an archive that was unpacked."""
    unpacked = run.path.parent.parent.parent / "unpacked"
    run.path.rename(unpacked)
    (run.path.parent / "run-1").symlink_to(unpacked)
    return open_deployment(run)


@pytest.mark.parametrize("make", [open_file, open_run, open_deployment, linked_from_an_open_folder])
def test_others_can_write(run: RunDir, bystander: subprocess.Popen[bytes], make: Callable[[RunDir], Path]) -> None:
    path = make(run)
    done = pdserve(run, "down", "fake")
    assert bystander.poll() is None
    assert done.returncode == 8
    assert "can be written by others" in done.stderr
    assert f"chmod go-w {path}" in " ".join(done.stderr.split())


@as_root
@pytest.mark.parametrize("what", ["state", "path"])
def test_what_is_anothers_kills_no_process(run: RunDir, bystander: subprocess.Popen[bytes], what: str) -> None:
    os.chown(getattr(run, what), STRANGER, STRANGER)
    done = pdserve(run, "down", "fake")
    assert bystander.poll() is None
    assert done.returncode == 8
    assert f"it belongs to uid {STRANGER}" in done.stderr
    assert f"sudo -u '#{STRANGER}'" in done.stderr


def test_without_a_name_it_is_refused_too(run: RunDir) -> None:
    path = open_run(run)
    with pytest.raises(NotOursError) as refused:
        find(run.path.parent.parent, None)
    assert refused.value.where == str(path)


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def test_without_a_umask_no_other_user_can_write_the_home_or_a_folder_above_it(tmp_path: Path) -> None:
    with umask(0):
        run = RunDir.create(tmp_path / "state" / "home", "fake", "run-1")
    for folder in (run.path, run.path.parent, tmp_path / "state" / "home", tmp_path / "state"):
        assert not folder.stat().st_mode & 0o022, folder
    assert (tmp_path / "state" / "home").stat().st_mode & 0o777 == 0o700


def test_what_a_umask_for_groups_makes_is_ours_alone(tmp_path: Path) -> None:
    """Also where an earlier version has left a folder that the group can write."""
    with umask(0o002):
        (tmp_path / "fake").mkdir()
        run = RunDir.create(tmp_path, "fake", "run-1")
        run.write(run.state, "{}")
        run.point_current()
    assert run.path.parent.stat().st_mode & 0o777 == 0o755
    with pytest.raises(StateError, match="written by another version of pdserve"):
        find(tmp_path, "fake").read_state()


# The lock of a deployment: no other user can hold it, and a process that does is named with the way out


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


def lock(run: RunDir) -> Path:
    return run.path.parent / "lock"


def test_no_other_user_can_open_it_also_where_an_earlier_version_left_it_open(run: RunDir) -> None:
    with run.only_launcher():
        assert lock(run).stat().st_mode & 0o777 == 0o600
    lock(run).chmod(0o644)
    with run.only_launcher():
        assert lock(run).stat().st_mode & 0o777 == 0o600


def test_who_holds_it_is_named(run: RunDir) -> None:
    lock(run).touch()
    with holder(lock(run), os.geteuid()) as pid:
        with pytest.raises(StateError, match="another pdserve up") as refused:
            check_no_launcher(run.path.parent.parent, "fake")
        with pytest.raises(StateError, match="another pdserve up"), run.only_launcher():
            raise AssertionError("two hold one lock")
    assert f"PID {pid} ({sys.executable} -c" in str(refused.value.cause)
    check_no_launcher(run.path.parent.parent, "fake")


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
