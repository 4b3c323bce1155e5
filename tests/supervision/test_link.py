"""A launcher and an agent that are not on one machine: silence, leases, requests on the other side."""

from __future__ import annotations

import asyncio
import contextlib
import re
import select
import signal
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from pdserve.errors import ServeError
from pdserve.launch.failure import serve_error
from pdserve.node import agent_record
from pdserve.plan.node import Node, Srun, Ssh
from pdserve.reach.link import DOCKER_HANGS
from pdserve.reach.protocol import (
    Died,
    Gone,
    Health,
    Hello,
    Late,
    Message,
    Progress,
    Ready,
    SignalReceived,
    Started,
    Stop,
    Stopped,
    line_of,
)
from pdserve.recipe.model import Timeouts
from pdserve.run.directory import RunDir
from pdserve.system.process import pid_end, send
from pdserve.system.procfs import ProcessId
from tests.launch.deployment import free_ports
from tests.plan.kit import plan
from tests.plan.kit import recipe as planned_recipe
from tests.supervision.agents import (
    HTTP_SERVER,
    LIMIT,
    NEVER_READY,
    AgentUnderTest,
    agent,
    linked,
    planned,
    until,
    until_gone,
)

pytestmark = pytest.mark.process

IGNORES_TERM = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)"
)
SOON = Timeouts(heartbeat_seconds=2, agent_lease_seconds=30)
"""Here agents are stopped, or their launcher is: their own lease has nothing to do with it."""
FAR = Node(name="far", reach=Ssh(destination="far.invalid"))


@pytest.fixture(autouse=True)
def _remote_shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An `ssh` that runs the command here, as sshd would: by a shell, from one string; and such an `srun`."""
    folder = tmp_path / "bin"
    folder.mkdir()
    srun = 'while [ "${1#--}" != "$1" ]; do shift; done\nexec "$@"'
    for name, line in (("ssh", 'for last; do :; done\nexec sh -c "exec $last"'), ("srun", srun)):
        (folder / name).write_text(f"#!/bin/sh\n{line}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


@contextlib.asynccontextmanager
async def far_agent(run_dir: Path, timeouts: Timeouts, node: Node = FAR) -> AsyncIterator[tuple[AgentUnderTest, Hello]]:
    """An agent that is reached as one of another host is, and its first word."""
    remote = AgentUnderTest(run_dir, node, timeouts)
    hello = await remote.expect(Hello)
    try:
        yield remote, hello
    finally:
        await remote.link.close(LIMIT)
        await pid_end(hello.agent.pid)


def error_of(gone: Gone, tmp_path: Path, timeouts: Timeouts) -> ServeError:
    """What the user is told of it."""
    made = plan(planned_recipe())
    there = made.model_copy(update={"nodes": (FAR,), "timeouts": timeouts})
    return serve_error(gone, there, RunDir(tmp_path))


async def test_an_agent_that_falls_silent_is_lost_once_and_not_believed_again(tmp_path: Path) -> None:
    async with far_agent(tmp_path, SOON) as (remote, hello):
        await remote.start(planned("engine", NEVER_READY))
        send(hello.agent, signal.SIGSTOP)
        gone = await remote.expect(Gone)
        assert gone.node == "far"
        assert "not heard for" in gone.how
        error = error_of(gone, tmp_path, SOON)
        assert (error.cause or "").startswith("the agent was stopped by SIGSTOP (kill -STOP, a debugger)")
        # Its pipe was closed with that: once it runs again, it leaves.
        send(hello.agent, signal.SIGCONT)
        assert await remote.link.close(LIMIT)
        assert not hello.agent.alive()
    assert (len(remote.all(Gone)), len(remote.all(Stopped))) == (1, 0)
    assert "the agent runs again" in (tmp_path / "logs/agent@far.log").read_text(), "its guard has written that"


async def test_the_client_of_a_lost_node_is_not_waited_for(tmp_path: Path) -> None:
    """An srun whose node is gone would wait for the controller to notice."""
    async with far_agent(tmp_path, SOON) as (remote, hello):
        for process in (hello.agent, hello.guard):
            send(process, signal.SIGSTOP)
        await remote.expect(Gone)
        assert not await remote.link.close(0.1)
        assert not hello.guard.alive()
        send(hello.agent, signal.SIGKILL)
    agent_record.remove_empty_cgroups(tmp_path, "run-1")  # as the next `up` does


async def test_a_launcher_that_was_held_does_not_blame_its_agents(tmp_path: Path) -> None:
    # The agent's own lease is longer: it is right not to believe in a launcher that says nothing.
    async with far_agent(tmp_path, SOON) as (remote, _):
        select.select([], [], [], 2 * SOON.heartbeat_seconds)  # the whole event loop, as a full disk would
        answer = await remote.link.ask("GET", "http://127.0.0.1:1/", seconds=60)
        assert answer.refused
        assert not remote.all(Gone)


async def test_a_launcher_that_was_held_longer_than_the_lease_is_named_as_the_cause(tmp_path: Path) -> None:
    timeouts = Timeouts(heartbeat_seconds=1, agent_lease_seconds=2)
    async with far_agent(tmp_path, timeouts) as (remote, _):
        engine = await remote.start(planned("engine", NEVER_READY))
        select.select([], [], [], 4)  # the whole event loop, as a SIGSTOP would
        gone = await remote.expect(Gone)
        await until_gone(engine)
    assert (gone.because, gone.how) == ("lease", "it heard nothing from the launcher for 2 s, its lease")
    error = error_of(gone, tmp_path, timeouts)
    assert re.match(r"the launcher itself stood still for [345] s: it was stopped", error.cause or ""), error.cause
    assert "timeouts.agent_lease_seconds" in (error.todo or "")
    assert "it heard nothing from the launcher for 2 s, its lease: stopping everything" in error.evidence


@pytest.mark.parametrize(
    ("victim", "signum", "because", "how", "cause"),
    [
        ("agent", signal.SIGKILL, "killed", "it was killed by SIGKILL", "it was killed there"),
        ("agent", signal.SIGTERM, "signal", "it received SIGTERM", "it was ended there"),
        ("guard", signal.SIGKILL, "signal", "its guard was killed", "it was ended there"),
    ],
)
async def test_an_agent_that_is_ended_reports_how(
    tmp_path: Path, victim: str, signum: signal.Signals, because: str, how: str, cause: str
) -> None:
    async with far_agent(tmp_path, SOON) as (remote, hello):
        send(getattr(hello, victim), signum)
        gone = await remote.expect(Gone)
    assert (gone.because, gone.how) == (because, how)
    assert cause in (error_of(gone, tmp_path, SOON).cause or "")


async def test_after_a_term_of_slurm_all_stops_fit_its_time(tmp_path: Path) -> None:
    """Its KillWait: the plan would give this process ten minutes."""
    in_job = Node(name="far", reach=Srun(job="1", kill_wait=2))
    async with far_agent(tmp_path, SOON, in_job) as (remote, hello):
        engine = await remote.start(planned("engine", IGNORES_TERM, stop_seconds=600))
        log = tmp_path / "logs" / "engine@here.log"
        await until(lambda: log.exists() and "deaf" in log.read_text())
        send(hello.agent, signal.SIGTERM)
        assert (await remote.expect(Stopped)).forced
        await until_gone(engine)


async def test_a_docker_that_hangs_before_the_first_word_is_a_lost_node() -> None:
    async def hangs() -> None:
        return

    async with linked("import sys; sys.stdin.read()", heartbeat=LIMIT, hang=hangs) as under_test:
        assert (await under_test.expect(Gone)).how == DOCKER_HANGS
        assert under_test.link.silent


async def test_requests_are_made_on_the_agents_node_and_each_has_its_answer(tmp_path: Path) -> None:
    [port] = free_ports(1)
    url = f"http://127.0.0.1:{port}/x"
    with socket.create_server(("127.0.0.1", 0)) as silent:
        without_answer = f"http://127.0.0.1:{silent.getsockname()[1]}/"
        async with agent(tmp_path) as under_test:
            await under_test.start(planned("web", HTTP_SERVER, str(port), port=port))
            await under_test.expect(Ready)
            answer = await under_test.link.ask("GET", url, seconds=60)
            assert (answer.status, answer.body) == (200, "ok")
            assert (await under_test.link.ask("POST", url, body="{}", seconds=60)).status == 501
            late = await under_test.link.ask("GET", without_answer, seconds=0.2)
            assert (late.status, late.refused, "0.2 s" in late.error) == (None, False, True)
            accepted = [silent.accept()[0]]
            pending = asyncio.create_task(under_test.link.ask("GET", without_answer, seconds=600))
            accepted.append((await asyncio.to_thread(silent.accept))[0])
        # The link is closed within its limit, whatever was asked over it.
        for connection in accepted:
            connection.close()
        assert (await pending).status is None
    assert (await under_test.link.ask("GET", url, seconds=1)).status is None


# An agent speaks of its own node and of its own processes only

ID = ProcessId(pid=1, start_ticks=1)
OF_ANOTHER: list[Message] = [
    Hello(node="b", agent=ID, guard=ID, hostname="b"),
    SignalReceived(node="b", signal="SIGTERM"),
    Gone(node="b", how="as if"),
    Started(name="decode-0", id=ID),
    Progress(name="decode-0", text="loading"),
    Ready(name="decode-0", seconds=1),
    Died(name="decode-0", pid=1, code=1, how="exit 1", seconds=1, while_starting=False),
    Late(name="decode-0", seconds=1, last_answer="", diagnostics=""),
    Health(name="decode-0", responsive=False),
    Stopped(name="decode-0", forced=False, seconds=1),
]

SAYS = "import sys; sys.stdin.readline(); sys.stdout.write(sys.argv[1]); sys.stdout.flush(); sys.stdin.read()"


async def heard(message: Message) -> Message:
    """What reaches the launcher of an agent of node a that says this, after orders for one process."""
    async with linked(SAYS, line_of(message).decode()) as under_test:
        under_test.link.send(Stop(name="prefill-0", grace=1))
        return await under_test.expect(Message)


async def test_news_of_another_node_or_process_is_a_protocol_error_and_recorded_nowhere() -> None:
    for event in await asyncio.gather(*map(heard, OF_ANOTHER)):
        assert isinstance(event, Gone)
        assert event.node == "a"
        assert event.how.startswith("agent@a: an agent reported ")
