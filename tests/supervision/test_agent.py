"""The node agent against real processes: what it reports, and that nothing survives it, however it ends."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Literal

import pytest

from pdserve.plan.frozen import Frozen
from pdserve.reach.protocol import Died, Gone, Health, Hello, Late, Ready, Start, Started
from pdserve.system import procfs
from pdserve.system.cgroup import SWITCH
from pdserve.system.process import send
from tests.launch.deployment import free_ports
from tests.launch.records import identity_of
from tests.supervision.agents import HTTP_SERVER, LIMIT, NEVER_READY, TOKEN, agent, pid_in, planned, until, until_gone

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


async def test_a_server_is_ready_silent_again_responsive_and_stopped_without_a_death(tmp_path: Path) -> None:
    [port] = free_ports(1)
    async with agent(tmp_path) as under_test:
        web = await under_test.start(planned("web", HTTP_SERVER, str(port), port=port))
        assert (await under_test.expect(Ready, "web")).seconds > 0
        send(web, signal.SIGSTOP)
        silent = await under_test.expect(Health, "web")
        assert not silent.responsive
        under_test.events.remove(silent)
        send(web, signal.SIGCONT)
        assert (await under_test.expect(Health, "web")).responsive
        await under_test.stop("web")
        assert not web.alive()
        assert not under_test.all(Died)


async def test_no_process_is_started_in_the_place_of_one_that_lives(tmp_path: Path) -> None:
    """Else nothing could stop the first one any more."""
    async with agent(tmp_path) as under_test:
        first = await under_test.start(planned("engine", NEVER_READY))
        under_test.link.send(Start(token=TOKEN, process=planned("engine", NEVER_READY)))
        died = await under_test.expect(Died, "engine")
        assert died.how == "could not be started: an earlier life of it was not stopped"
        await under_test.stop("engine")
        assert not first.alive()
        assert len(under_test.all(Started)) == 1
        assert (await under_test.stop("another")).seconds == 0, "what is gone already is answered"


async def test_every_end_while_starting_is_a_death_with_its_log(tmp_path: Path) -> None:
    code = "import sys; print('loading'); print('no such flag', file=sys.stderr); sys.exit(2)"
    missing = planned("missing", "pass").model_copy(update={"argv": ("/nonexistent/vllm",)})
    async with agent(tmp_path) as under_test:
        for process in (planned("engine", code), planned("clean", "pass"), missing):
            under_test.link.send(Start(token=TOKEN, process=process))
        died = await under_test.expect(Died, "engine")
        assert (died.code, died.while_starting, died.member) == (2, True, None)
        assert sorted(died.log_tail) == ["loading", "no such flag"]
        assert (await under_test.expect(Died, "clean")).code == 0
        died = await under_test.expect(Died, "missing")
        assert (died.code, "could not be executed" in died.how) == (None, True)
        assert not any(isinstance(event, Ready | Late) for event in under_test.events)


async def test_alive_but_never_ready_is_late_with_diagnostics(tmp_path: Path) -> None:
    async with agent(tmp_path) as under_test:
        started = await under_test.start(planned("engine", NEVER_READY, ready_seconds=3))
        late = await under_test.expect(Late, "engine")
        assert started.alive(), "what to do with it is the launcher's decision"
    assert late.diagnostics is not None
    snapshot = (tmp_path / late.diagnostics).read_text()
    assert late.log_tail == ("thinking",)
    assert "nothing listens" in late.last_answer
    assert "process tree (1)" in snapshot
    assert "Python stack of" in snapshot


@pytest.mark.parametrize("victims", [("agent",), ("launcher",), ("agent", "launcher"), ("guard",)], ids="+".join)
async def test_nothing_survives(tmp_path: Path, victims: tuple[str, ...]) -> None:
    """The launcher dies: its pipe closes. Agent and guard are killed. A tree that ignores TERM goes as well."""
    pid_file = tmp_path / "pid"
    async with agent(tmp_path) as under_test:
        hello = await under_test.expect(Hello)
        started = await under_test.start(planned("engine", STUBBORN_CHILD, str(pid_file)))
        member = identity_of(await pid_in(pid_file))
        if "agent" in victims:
            send(hello.agent, signal.SIGKILL)
        if "guard" in victims:
            send(hello.guard, signal.SIGKILL)
        if "launcher" in victims:
            assert await under_test.link.close(LIMIT)
        else:
            await under_test.expect(Gone)
        await until_gone(hello.agent, started, member, hello.guard)


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


class Dance(Frozen):
    """No order of the protocol."""

    do: Literal["dance"] = "dance"


async def test_an_unreadable_order_ends_the_agent_with_its_reason(tmp_path: Path) -> None:
    async with agent(tmp_path) as under_test:
        await under_test.expect(Hello)
        under_test.link._channel.send(Dance())
        await under_test.expect(Gone)
    assert "unreadable order" in (tmp_path / "logs/agent@here.log").read_text()
