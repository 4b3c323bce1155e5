"""Names in environments: what an earlier life has left is not of the next one, and a copied name counts for nothing."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from pydantic import ValidationError

from pdserve.reach.protocol import Died, Start, Started
from pdserve.system import procfs
from pdserve.system.cgroup import SWITCH
from pdserve.system.process import MARKER
from tests.launch.records import identity_of
from tests.supervision.agents import NEVER_READY, agent, planned, until

LEAVES_A_MEMBER = """
import os, sys, time
written, writing = os.pipe()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        with open(sys.argv[1], "w") as file:
            file.write(str(os.getpid()))
        os.close(writing)
        time.sleep(600)
    os._exit(0)
os.close(writing)
os.read(written, 1)
os.wait()
"""
"""It has left parent and session, and nobody stops it before the next life begins."""
pytestmark = [pytest.mark.process, pytest.mark.parametrize("cgroups", ["on", "off"])]


@pytest.fixture(autouse=True)
def _cgroups(cgroups: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, cgroups)


async def test_what_is_left_of_an_earlier_life_is_none_of_the_next_one(tmp_path: Path) -> None:
    file = tmp_path / "pid"

    async with agent(tmp_path) as under_test:
        under_test.link.send(Start(process=planned("engine", LEAVES_A_MEMBER, str(file)), token="t"))
        await under_test.expect(Died, "engine")
        left = identity_of(int(file.read_text()))
        under_test.link.send(Start(process=planned("engine", NEVER_READY), token="t"))
        await until(lambda: len(under_test.all(Started)) == 2)
        await under_test.stop("engine")
        assert left.alive(), "it was not stopped with a life that is not its own"
    assert not left.alive(), "the agent leaves nothing"


def environment(pid: int) -> dict[bytes, bytes]:
    return dict(each.split(b"=", 1) for each in procfs.environment(pid) if b"=" in each)


async def test_who_copies_the_environment_is_touched_by_no_stop(tmp_path: Path) -> None:
    async with agent(tmp_path) as under_test:
        under_test.link.send(Start(process=planned("engine", NEVER_READY), token="t"))
        started = (await under_test.expect(Started, "engine")).id
        # In the middle of an exec a process shows no environment.
        await until(lambda: MARKER.encode() in environment(started.pid))
        copied = environment(started.pid)
        assert copied[MARKER.encode()] == b"run-1/t/engine.1"
        assert not Path(f"/proc/{started.pid}/environ").stat().st_mode & 0o077
        assert "run-1/t/" not in procfs.command(started.pid) + procfs.command(os.getpid())
        with subprocess.Popen(["sleep", "600"], env=copied, start_new_session=True) as stranger:
            try:
                await under_test.stop("engine")
                assert stranger.poll() is None
            finally:
                stranger.kill()


def test_no_process_is_started_without_the_token_of_its_run() -> None:
    """Who clears up after a run without one would end the processes of every other run without one."""
    with pytest.raises(ValidationError, match="token"):
        Start(process=planned("engine", NEVER_READY), token="")
