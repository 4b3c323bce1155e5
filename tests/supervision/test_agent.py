"""The node agent against real processes: what it reports, and that nothing survives it, however it ends."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdserve.reach.protocol import Died, Gone, Hello, Start, Started
from pdserve.system import cgroup, procfs
from pdserve.system.cgroup import SWITCH, Cgroup, place
from pdserve.system.process import send, stop_family
from pdserve.system.procfs import ProcessId
from tests.fakes.engine_process import DAEMON
from tests.launch.records import identity_of
from tests.supervision.agents import NEVER_READY, TOKEN, agent, pid_in, planned, until, until_gone

pytestmark = pytest.mark.process

STUBBORN_CHILD = """
import os, signal, sys, time
if os.fork() == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    open(sys.argv[1], "w").write(str(os.getpid()))
    time.sleep(600)
time.sleep(600)
"""
LEAVES_SHM = """
import mmap, os, sys, time
fd = os.open("/dev/shm/" + sys.argv[1], os.O_CREAT | os.O_RDWR)
os.ftruncate(fd, 4096)
segment = mmap.mmap(fd, 4096)
print("mapped", flush=True)
time.sleep(600)
"""


LEAVES_A_DAEMON = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execve(sys.executable, [sys.executable, "-c", sys.argv[2], sys.argv[1]], {})
    os._exit(0)
os.wait()
time.sleep(600)
"""
"""It has left parent, session and environment: only who adopted it knows it."""
WRITES_ITS_PID = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(600)"


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


@pytest.mark.parametrize("cgroups", ["on", "off"])
async def test_what_is_left_of_an_earlier_life_is_none_of_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cgroups: str
) -> None:
    monkeypatch.setenv(SWITCH, cgroups)
    file = tmp_path / "pid"
    async with agent(tmp_path) as under_test:
        under_test.link.send(Start(process=planned("engine", LEAVES_A_MEMBER, str(file)), token=TOKEN))
        await under_test.expect(Died, "engine")
        left = identity_of(int(file.read_text()))
        under_test.link.send(Start(process=planned("engine", NEVER_READY), token=TOKEN))
        await until(lambda: len(under_test.all(Started)) == 2)
        await under_test.stop("engine")
        assert left.alive(), "it was not stopped with a life that is not its own"
    assert not left.alive(), "the agent leaves nothing"


async def test_an_agent_whose_guard_is_dead_leaves_no_daemon_that_it_has_adopted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SWITCH, "off")
    pid_file = tmp_path / "pid"
    async with agent(tmp_path) as under_test:
        hello = await under_test.expect(Hello)
        await under_test.start(planned("engine", LEAVES_A_DAEMON, str(pid_file), WRITES_ITS_PID))
        daemon = identity_of(await pid_in(pid_file))
        try:
            send(hello.guard, signal.SIGKILL)
            await under_test.expect(Gone)
            await until_gone(hello.agent)
            assert not daemon.alive()
        finally:
            send(daemon, signal.SIGKILL)
            await until_gone(daemon)


async def test_a_guard_that_gets_a_signal_while_it_clears_up_clears_up(tmp_path: Path) -> None:
    """Its agent has been waited for by then: the agent's number is free, or a stranger's."""
    pid_file = tmp_path / "pid"
    async with agent(tmp_path) as under_test:
        hello = await under_test.expect(Hello)
        started = await under_test.start(planned("engine", STUBBORN_CHILD, str(pid_file), stop_seconds=5))
        member = identity_of(await pid_in(pid_file))
        try:
            send(hello.agent, signal.SIGKILL)
            await under_test.expect(Gone)  # said by the guard, once it has waited for the agent
            assert member.alive(), "it ignores TERM: the guard is busy with it"
            for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                assert send(hello.guard, signum)
            await until_gone(hello.guard)
            assert not member.alive()
        finally:
            for process in (started, member):
                send(process, signal.SIGKILL)
    assert "Traceback" not in (tmp_path / "logs/agent@here.log").read_text()


async def test_shared_memory_of_strangers_is_not_touched(tmp_path: Path) -> None:
    """Older than the deployment, or in a folder of /dev/shm, as weights that the engine maps: never ours to remove."""
    segment = procfs.SHM / f"pdserve-test-{os.getpid()}-stranger"
    segment.write_bytes(b"\0" * 4096)
    folder = procfs.SHM / f"pdserve-test-{os.getpid()}-model"
    weights = folder / "model.safetensors"
    try:
        async with agent(tmp_path) as under_test:
            await under_test.expect(Hello)
            folder.mkdir()
            for name, file in (("engine", segment.name), ("loader", f"{folder.name}/{weights.name}")):
                await under_test.start(planned(name, LEAVES_SHM, file))
                log = tmp_path / f"logs/{name}@here.log"
                await until(lambda log=log: "mapped" in log.read_text())  # type: ignore[misc]
                await under_test.stop(name)
        assert segment.exists()
        assert weights.exists()
    finally:
        segment.unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)


# A process in a cgroup of its own. Where none can be made it is said why, and processes run without one


AND_STAYS = (
    f"import subprocess, sys, time; subprocess.run([sys.executable, '-c', {DAEMON!r}], env={{}}); time.sleep(600)"
)


@pytest.fixture
def ours() -> Iterator[Cgroup | None]:
    """A cgroup of the test's own; None where none can be made, which is then said."""
    made, why_not = cgroup.make_own_cgroup(f"{cgroup.prefix('test')}here-{os.getpid()}", os.environ)
    assert (made is None) == bool(why_not)
    yield made
    if made is not None and not made.remove():
        left = made.members()
        # The next test's has the same name.
        asyncio.run(stop_family(made.members, orphan_grace=0, cgroups=(made,)))
        raise AssertionError(f"left in the cgroup: {left}")


async def daemon_of(log: Path) -> ProcessId:
    """What the log names, once it does."""
    await until(lambda: log.exists() and "daemon " in log.read_text() and log.read_text().endswith("\n"))
    return identity_of(int(log.read_text().split()[-1]))


def test_no_process_kills_its_own_cgroup(ours: Cgroup | None) -> None:
    if ours is None:
        return
    with ours.born_here():
        ours.kill()
        assert not ours.remove()
    assert place()[0] == ours.path.parent


@pytest.mark.parametrize("how", ["stop", "agent killed", "guard killed"])
async def test_a_daemon_of_an_agents_process_ends_with_it(tmp_path: Path, how: str, ours: Cgroup | None) -> None:
    """Without a cgroup, with its agent."""

    async with agent(tmp_path) as under_test:
        hello = await under_test.expect(Hello)
        assert (hello.cgroup is None) == bool(hello.no_cgroup) == (ours is None)
        started = await under_test.start(planned("engine", AND_STAYS))
        daemon = await daemon_of(tmp_path / "logs/engine@here.log")
        if how == "stop":
            await under_test.stop("engine")
            assert daemon.alive() == (ours is None)
        if how in ("agent killed", "guard killed"):
            send(hello.agent if how == "agent killed" else hello.guard, signal.SIGKILL)
            await under_test.expect(Gone)
    for process in (started, hello.agent, hello.guard):
        await until_gone(process)
    assert not daemon.alive()
    assert hello.cgroup is None or not Path(hello.cgroup.path).exists()
