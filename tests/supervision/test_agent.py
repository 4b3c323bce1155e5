"""The node agent against real processes: what it reports, and that nothing survives it, however it ends."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Literal

import pytest

from pdserve.plan.frozen import Frozen
from pdserve.reach.protocol import Died, Gone, Health, Hello, Late, Ready, Start, Started, Stop, Stopped
from pdserve.system import procfs
from pdserve.system.cgroup import SWITCH
from pdserve.system.process import send
from pdserve.system.procfs import ProcessId
from tests.launch.deployment import free_ports
from tests.supervision.agents import HTTP_SERVER, LIMIT, NEVER_READY, TOKEN, agent, planned

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


@pytest.fixture
def port() -> int:
    return free_ports(1)[0]


async def until_gone(identity: ProcessId) -> None:
    while identity.alive():
        await asyncio.sleep(0.01)


async def until_file(path: Path) -> int:
    while not (path.exists() and path.read_text()):
        await asyncio.sleep(0.01)
    return int(path.read_text())


def test_ready_when_its_own_socket_answers(tmp_path: Path, port: int) -> None:
    async def scenario() -> None:
        async with agent(tmp_path) as under_test:
            under_test.link.send(Start(token=TOKEN, process=planned("web", HTTP_SERVER, str(port), port=port)))
            started = await under_test.expect(Started, "web")
            ready = await under_test.expect(Ready, "web")
            assert started.id.alive()
            assert ready.seconds > 0

    asyncio.run(scenario())


def test_no_process_is_started_in_the_place_of_one_that_lives(tmp_path: Path) -> None:
    """Else nothing could stop the first one any more."""

    async def scenario() -> None:
        async with agent(tmp_path) as under_test:
            under_test.link.send(Start(token=TOKEN, process=planned("engine", NEVER_READY)))
            first = await under_test.expect(Started, "engine")
            under_test.link.send(Start(token=TOKEN, process=planned("engine", NEVER_READY)))
            died = await under_test.expect(Died, "engine")
            assert died.how == "could not be started: an earlier life of it was not stopped"
            under_test.link.send(Stop(name="engine", grace=5))
            await under_test.expect(Stopped, "engine")
            assert not first.id.alive()
            assert sum(isinstance(event, Started) for event in under_test.events) == 1

    asyncio.run(scenario())


def test_a_death_while_starting_is_an_event_with_its_log(tmp_path: Path) -> None:
    code = "import sys; print('loading'); print('no such flag', file=sys.stderr); sys.exit(2)"

    async def scenario() -> Died:
        async with agent(tmp_path) as under_test:
            under_test.link.send(Start(token=TOKEN, process=planned("engine", code)))
            died = await under_test.expect(Died, "engine")
            assert not any(isinstance(event, Ready | Late) for event in under_test.events)
            return died

    died = asyncio.run(scenario())
    assert (died.code, died.while_starting, died.member) == (2, True, None)
    assert sorted(died.log_tail) == ["loading", "no such flag"]


def test_a_clean_exit_is_a_death_too(tmp_path: Path) -> None:
    async def scenario() -> Died:
        async with agent(tmp_path) as under_test:
            under_test.link.send(Start(token=TOKEN, process=planned("engine", "pass")))
            return await under_test.expect(Died, "engine")

    assert asyncio.run(scenario()).code == 0


def test_a_program_that_cannot_be_executed_is_a_death(tmp_path: Path) -> None:
    process = planned("engine", "pass").model_copy(update={"argv": ("/nonexistent/vllm",)})

    async def scenario() -> Died:
        async with agent(tmp_path) as under_test:
            under_test.link.send(Start(token=TOKEN, process=process))
            return await under_test.expect(Died, "engine")

    died = asyncio.run(scenario())
    assert died.code is None
    assert "could not be executed" in died.how


def test_alive_but_never_ready_is_late_with_diagnostics(tmp_path: Path) -> None:
    async def scenario() -> Late:
        async with agent(tmp_path) as under_test:
            under_test.link.send(Start(token=TOKEN, process=planned("engine", NEVER_READY, ready_seconds=6)))
            started = await under_test.expect(Started, "engine")
            late = await under_test.expect(Late, "engine")
            assert started.id.alive(), "what to do with it is the launcher's decision"
            return late

    late = asyncio.run(scenario())
    assert late.diagnostics is not None
    snapshot = (tmp_path / late.diagnostics).read_text()
    assert late.log_tail == ("thinking",)
    assert "nothing listens" in late.last_answer
    assert "process tree (1)" in snapshot
    assert "Python stack of" in snapshot


def test_stop_is_answered_and_is_no_death(tmp_path: Path, port: int) -> None:
    async def scenario() -> None:
        async with agent(tmp_path) as under_test:
            under_test.link.send(Start(token=TOKEN, process=planned("web", HTTP_SERVER, str(port), port=port)))
            started = await under_test.expect(Started, "web")
            under_test.link.send(Stop(name="web", grace=10))
            await under_test.expect(Stopped, "web")
            assert not started.id.alive()
            assert not any(isinstance(event, Died) for event in under_test.events)

    asyncio.run(scenario())


def test_stopping_what_is_gone_already_is_answered(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with agent(tmp_path) as under_test:
            under_test.link.send(Stop(name="engine", grace=600))
            assert (await under_test.expect(Stopped, "engine")).seconds == 0

    asyncio.run(scenario())


def test_a_stopped_server_is_reported_and_its_return_too(tmp_path: Path, port: int) -> None:
    async def scenario() -> None:
        async with agent(tmp_path) as under_test:
            under_test.link.send(Start(token=TOKEN, process=planned("web", HTTP_SERVER, str(port), port=port)))
            started = await under_test.expect(Started, "web")
            await under_test.expect(Ready, "web")
            send(started.id, signal.SIGSTOP)
            silent = await under_test.expect(Health, "web")
            assert not silent.responsive
            under_test.events.remove(silent)
            send(started.id, signal.SIGCONT)
            assert (await under_test.expect(Health, "web")).responsive

    asyncio.run(scenario())


@pytest.mark.parametrize("victims", [("agent",), ("launcher",), ("agent", "launcher"), ("guard",)], ids="+".join)
def test_nothing_survives(tmp_path: Path, victims: tuple[str, ...]) -> None:
    """The launcher dies: its pipe closes. Agent and guard are killed. A tree that ignores TERM goes as well."""
    pid_file = tmp_path / "pid"

    async def scenario() -> None:
        async with agent(tmp_path) as under_test:
            under_test.link.send(Start(token=TOKEN, process=planned("engine", STUBBORN_CHILD, str(pid_file))))
            hello = await under_test.expect(Hello)
            started = await under_test.expect(Started, "engine")
            member = procfs.identify(await until_file(pid_file))
            assert member is not None
            if "agent" in victims:
                send(hello.agent, signal.SIGKILL)
            if "guard" in victims:
                send(hello.guard, signal.SIGKILL)
            if "launcher" in victims:
                assert await under_test.link.close(LIMIT)
            else:
                await under_test.expect(Gone)
            for process in (hello.agent, started.id, member, hello.guard):
                await asyncio.wait_for(until_gone(process), LIMIT)

    asyncio.run(scenario())


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


def test_an_agent_whose_guard_is_dead_leaves_no_daemon_that_it_has_adopted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SWITCH, "off")
    pid_file = tmp_path / "pid"

    async def scenario() -> None:
        async with agent(tmp_path) as under_test:
            under_test.link.send(
                Start(token=TOKEN, process=planned("engine", LEAVES_A_DAEMON, str(pid_file), WRITES_ITS_PID))
            )
            hello = await under_test.expect(Hello)
            daemon = procfs.identify(await until_file(pid_file))
            assert daemon is not None
            try:
                send(hello.guard, signal.SIGKILL)
                await under_test.expect(Gone)
                await asyncio.wait_for(until_gone(hello.agent), LIMIT)
                assert not daemon.alive()
            finally:
                send(daemon, signal.SIGKILL)
                await asyncio.wait_for(until_gone(daemon), LIMIT)

    asyncio.run(scenario())


ORPHAN = """
import os, signal, sys
from pdserve.node import agent

asked = agent.die_with_parent

def too_late(signum):
    guard = os.getppid()
    os.kill(guard, signal.SIGKILL)
    while os.getppid() == guard:
        pass
    asked(signum)

agent.die_with_parent = too_late
agent.cgroup.make = lambda *_: agent.cgroup.Made(None)  # which a guard would remove
sys.exit(agent.main())
"""


def test_an_agent_whose_guard_died_before_it_could_hear_of_that_leaves(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", ORPHAN, "--node", "n", "--run-dir", str(tmp_path), "--run-id", "r"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as guard:
        assert guard.stdout is not None
        assert guard.stdout.readline() == b"", "it says nothing, and closes its pipe"


def test_a_guard_that_gets_a_signal_while_it_clears_up_clears_up(tmp_path: Path) -> None:
    """Its agent has been waited for by then: the agent's number is free, or a stranger's."""
    pid_file = tmp_path / "pid"

    async def scenario() -> None:
        async with agent(tmp_path) as under_test:
            under_test.link.send(Start(token=TOKEN, process=planned("engine", STUBBORN_CHILD, str(pid_file))))
            hello = await under_test.expect(Hello)
            started = await under_test.expect(Started, "engine")
            member = procfs.identify(await until_file(pid_file))
            assert member is not None
            try:
                send(hello.agent, signal.SIGKILL)
                await under_test.expect(Gone)  # said by the guard, once it has waited for the agent
                assert member.alive(), "it ignores TERM: the guard is busy with it"
                for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                    assert send(hello.guard, signum)
                await asyncio.wait_for(until_gone(hello.guard), LIMIT)
                assert not member.alive()
            finally:
                for process in (started.id, member):
                    send(process, signal.SIGKILL)

    asyncio.run(scenario())
    assert "Traceback" not in (tmp_path / "logs/agent@here.log").read_text()


def test_files_in_a_folder_of_dev_shm_are_not_touched(tmp_path: Path) -> None:
    """Weights on /dev/shm, mapped by the engine: newer than the agent, and nobody else's mapping protects them."""
    folder = procfs.SHM / f"pdserve-test-{os.getpid()}-model"
    weights = folder / "model.safetensors"

    async def scenario() -> None:
        async with agent(tmp_path) as under_test:
            await under_test.expect(Hello)
            folder.mkdir()
            under_test.link.send(
                Start(token=TOKEN, process=planned("engine", LEAVES_SHM, f"{folder.name}/{weights.name}"))
            )
            await under_test.expect(Started, "engine")
            while "mapped" not in (tmp_path / "logs/engine@here.log").read_text():
                await asyncio.sleep(0.01)
            under_test.link.send(Stop(name="engine", grace=5))
            await under_test.expect(Stopped, "engine")

    try:
        asyncio.run(scenario())
        assert weights.exists()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.parametrize("how", ["killed", "agent killed"])
def test_shared_memory_of_a_killed_process_is_removed(tmp_path: Path, how: str) -> None:
    name = f"pdserve-test-{os.getpid()}-{how.replace(' ', '-')}"
    segment = procfs.SHM / name

    async def scenario() -> None:
        async with agent(tmp_path) as under_test:
            under_test.link.send(Start(token=TOKEN, process=planned("engine", LEAVES_SHM, name)))
            hello = await under_test.expect(Hello)
            started = await under_test.expect(Started, "engine")
            while (
                name not in (tmp_path / "shm@here.json").read_text() if (tmp_path / "shm@here.json").exists() else True
            ):
                await asyncio.sleep(0.01)
            if how == "killed":
                send(started.id, signal.SIGKILL)
                await under_test.expect(Died, "engine")
                under_test.link.send(Stop(name="engine", grace=5))
                await under_test.expect(Stopped, "engine")
            else:
                send(hello.agent, signal.SIGKILL)
                await under_test.expect(Gone)
                await asyncio.wait_for(until_gone(hello.guard), LIMIT)
            assert not segment.exists()

    try:
        asyncio.run(scenario())
    finally:
        segment.unlink(missing_ok=True)


def test_shared_memory_of_strangers_is_not_touched(tmp_path: Path) -> None:
    """Older than the deployment, or mapped by a living process: never ours to remove."""
    name = f"pdserve-test-{os.getpid()}-stranger"
    segment = procfs.SHM / name
    segment.write_bytes(b"\0" * 4096)

    async def scenario() -> None:
        async with agent(tmp_path) as under_test:
            under_test.link.send(Start(token=TOKEN, process=planned("engine", LEAVES_SHM, name)))
            await under_test.expect(Started, "engine")
            while "mapped" not in (tmp_path / "logs/engine@here.log").read_text():
                await asyncio.sleep(0.01)
            under_test.link.send(Stop(name="engine", grace=5))
            await under_test.expect(Stopped, "engine")

    try:
        asyncio.run(scenario())
        assert segment.exists()
    finally:
        segment.unlink(missing_ok=True)


class Dance(Frozen):
    """No order of the protocol."""

    do: Literal["dance"] = "dance"


def test_an_unreadable_order_ends_the_agent_with_its_reason(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with agent(tmp_path) as under_test:
            await under_test.expect(Hello)
            under_test.link._channel.send(Dance())
            await under_test.expect(Gone)

    asyncio.run(scenario())
    assert "unreadable order" in (tmp_path / "logs/agent@here.log").read_text()
