"""A launcher and an agent that are not on one machine: silence, leases, requests on the other side."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pdserve.errors import ServeError
from pdserve.launch.failure import serve_error
from pdserve.node import agent_record
from pdserve.plan.node import Node, Ssh
from pdserve.reach.agent_start import open_agent
from pdserve.reach.channel import line_of
from pdserve.reach.link import AgentLink
from pdserve.reach.protocol import Event, Gone, Hello, Ready, Start, Started, Stopped
from pdserve.recipe.model import Timeouts
from pdserve.run.directory import RunDir
from pdserve.system.process import pid_end, send
from pdserve.system.procfs import ProcessId
from tests.launch.deployment import free_ports
from tests.plan.kit import plan
from tests.plan.kit import recipe as planned_recipe
from tests.supervision.agents import HTTP_SERVER, LIMIT, TOKEN, agent, planned

pytestmark = pytest.mark.process

IGNORES_TERM = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)"
)
SOON = Timeouts(heartbeat_seconds=2, agent_lease_seconds=30)
"""Here agents are stopped, or their launcher is: their own lease has nothing to do with it."""
FAR = Node(name="far", reach=Ssh(destination="far.invalid"))


@pytest.fixture
def port() -> int:
    return free_ports(1)[0]


@pytest.fixture
def ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An `ssh` that runs the command here, as sshd would: by a shell, from one string."""
    folder = tmp_path / "bin"
    folder.mkdir()
    program = folder / "ssh"
    program.write_text('#!/bin/sh\nfor last; do :; done\nexec sh -c "exec $last"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return program


class Remote:
    """An agent that is reached as one of another host is."""

    def __init__(self, run_dir: Path, timeouts: Timeouts) -> None:
        self.events: list[Event] = []
        self._arrived = asyncio.Event()
        self.link: AgentLink = open_agent(FAR, run_dir, "run-1", timeouts, self._receive)

    def _receive(self, event: Event) -> None:
        self.events.append(event)
        self._arrived.set()

    async def expect(self, kind: type[Event]) -> Event:
        while True:
            for event in self.events:
                if isinstance(event, kind):
                    return event
            self._arrived.clear()
            await asyncio.wait_for(self._arrived.wait(), LIMIT)


def run_with(tmp_path: Path, timeouts: Timeouts, scenario: Callable[[Remote, Hello], object]) -> Remote:
    async def whole() -> Remote:
        remote = Remote(tmp_path, timeouts)
        hello = await remote.expect(Hello)
        assert isinstance(hello, Hello)
        await scenario(remote, hello)  # type: ignore[misc]
        return remote

    return asyncio.run(whole())


def test_an_agent_that_falls_silent_is_lost_and_reported_once(tmp_path: Path, ssh: Path) -> None:
    async def scenario(remote: Remote, hello: Hello) -> None:
        send(hello.agent, signal.SIGSTOP)
        gone = await remote.expect(Gone)
        assert isinstance(gone, Gone)
        assert gone.node == "far"
        assert "not heard for" in gone.how
        # Its pipe was closed with that: once it runs again, it leaves.
        send(hello.agent, signal.SIGCONT)
        assert await remote.link.close(LIMIT)
        assert not hello.agent.alive()

    remote = run_with(tmp_path, SOON, scenario)
    assert [type(event) for event in remote.events].count(Gone) == 1


def test_the_client_of_a_lost_node_is_not_waited_for(tmp_path: Path, ssh: Path) -> None:
    """An srun whose node is gone would wait for the controller to notice."""

    async def scenario(remote: Remote, hello: Hello) -> None:
        for process in (hello.agent, hello.guard):
            send(process, signal.SIGSTOP)
        await remote.expect(Gone)
        assert not await remote.link.close(0.1)
        assert not hello.guard.alive()
        send(hello.agent, signal.SIGKILL)
        await pid_end(hello.agent.pid)

    run_with(tmp_path, SOON, scenario)
    agent_record.remove_empty_cgroups(tmp_path, "run-1")  # as the next `up` does


def test_a_launcher_that_was_held_does_not_blame_its_agents(tmp_path: Path, ssh: Path) -> None:
    async def scenario(remote: Remote, hello: Hello) -> None:
        select.select([], [], [], 2 * timeouts.heartbeat_seconds)  # the whole event loop, as a full disk would
        answer = await remote.link.ask("GET", "http://127.0.0.1:1/", seconds=60)
        assert answer.refused
        assert not [event for event in remote.events if isinstance(event, Gone)]
        assert await remote.link.close(LIMIT)

    # The agent's own lease is longer: it is right not to believe in a launcher that says nothing.
    timeouts = Timeouts(heartbeat_seconds=4, agent_lease_seconds=60)
    run_with(tmp_path, timeouts, scenario)


@contextlib.contextmanager
def mute_launcher(run_dir: Path, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    """An agent on a pipe that stays open and says nothing more: a cut cable gives no EOF."""
    (run_dir / "logs").mkdir()
    argv = [
        sys.executable,
        "-m",
        "pdserve.node.agent",
        "--node",
        "here",
        "--run-dir",
        str(run_dir),
        "--run-id",
        "run-1",
    ]
    with (run_dir / "agent.log").open("wb") as log:
        popen = subprocess.Popen([*argv, *options], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log)
    assert popen.stdin is not None
    assert popen.stdout is not None
    try:
        yield popen
    finally:
        popen.stdin.close()
        popen.wait(LIMIT)
        popen.stdout.close()


def events(popen: subprocess.Popen[bytes], kind: str) -> dict[str, object]:
    assert popen.stdout is not None
    for line in popen.stdout:
        event: dict[str, object] = json.loads(line)
        if event["event"] == kind:
            return event
    raise AssertionError(f"the agent ended without saying {kind}")


def order(popen: subprocess.Popen[bytes], code: str, **planning: float) -> ProcessId:
    assert popen.stdin is not None
    process = planned("engine", code).model_copy(update={"probe": None, **planning})
    popen.stdin.write(line_of(Start(token=TOKEN, process=process)))
    popen.stdin.flush()
    return ProcessId.model_validate(events(popen, "started")["id"])


def test_an_agent_that_hears_nothing_for_its_lease_stops_everything(tmp_path: Path) -> None:
    with mute_launcher(tmp_path, "--lease", "1", "--pulse", "0.2") as popen:
        engine = order(popen, "import time; time.sleep(600)")
        assert events(popen, "stopped")["name"] == "engine"
        assert popen.wait(LIMIT) == 0
        assert not engine.alive()
    assert "it heard nothing from the launcher for 1 s, its lease" in (tmp_path / "agent.log").read_text()


# An agent that leaves unasked says why, over its pipe and in its log -------------------------------------------------


def lost_by(tmp_path: Path, timeouts: Timeouts, fault: Callable[[Remote, Hello], object]) -> Gone:
    """What the launcher hears of an agent that is gone after `fault`."""
    losses: list[Gone] = []

    async def scenario(remote: Remote, hello: Hello) -> None:
        fault(remote, hello)
        gone = await remote.expect(Gone)
        assert isinstance(gone, Gone)
        losses.append(gone)
        assert await remote.link.close(LIMIT)
        await pid_end(hello.agent.pid)

    run_with(tmp_path, timeouts, scenario)
    return losses[0]


def error_of(gone: Gone, tmp_path: Path, timeouts: Timeouts) -> ServeError:
    """What the user is told of it."""
    made = plan(planned_recipe())
    there = made.model_copy(update={"nodes": (FAR,), "timeouts": timeouts})
    return serve_error(gone, there, RunDir(tmp_path))


def test_a_launcher_that_was_held_longer_than_the_lease_is_named_as_the_cause(tmp_path: Path, ssh: Path) -> None:
    timeouts = Timeouts(heartbeat_seconds=1, agent_lease_seconds=2)

    def held(remote: Remote, hello: Hello) -> None:
        select.select([], [], [], 6)  # the whole event loop, as a SIGSTOP would

    gone = lost_by(tmp_path, timeouts, held)
    assert (gone.because, gone.how) == ("lease", "it heard nothing from the launcher for 2 s, its lease")
    error = error_of(gone, tmp_path, timeouts)
    assert re.match(r"the launcher itself stood still for [56] s: it was stopped", error.cause or ""), error.cause
    assert "timeouts.agent_lease_seconds" in (error.todo or "")
    assert "it heard nothing from the launcher for 2 s, its lease: stopping everything" in error.evidence


def test_a_killed_agent_is_reported_by_its_guard(tmp_path: Path, ssh: Path) -> None:
    gone = lost_by(tmp_path, SOON, lambda remote, hello: send(hello.agent, signal.SIGKILL))
    assert (gone.because, gone.how) == ("killed", "it was killed by SIGKILL")
    error = error_of(gone, tmp_path, SOON)
    assert "it was killed there" in (error.cause or "")
    assert "the agent was killed by SIGKILL: its guard stops what it owned" in error.evidence


def test_a_stopped_agent_is_reported_by_its_guard_in_the_log(tmp_path: Path, ssh: Path) -> None:
    errors: list[ServeError] = []

    async def scenario(remote: Remote, hello: Hello) -> None:
        send(hello.agent, signal.SIGSTOP)
        gone = await remote.expect(Gone)
        assert isinstance(gone, Gone)
        errors.append(error_of(gone, tmp_path, SOON))
        send(hello.agent, signal.SIGCONT)
        assert await remote.link.close(LIMIT)

    run_with(tmp_path, SOON, scenario)
    assert (errors[0].cause or "").startswith("the agent was stopped by SIGSTOP (kill -STOP, a debugger)")
    assert "the agent runs again" in (tmp_path / "logs/agent@far.log").read_text()


@pytest.mark.parametrize(
    ("victim", "signum", "how"),
    [
        ("agent", signal.SIGTERM, "it received SIGTERM"),
        ("guard", signal.SIGKILL, "its guard was killed"),
    ],
)
def test_an_agent_that_is_ended_by_a_signal_reports_it(
    tmp_path: Path, ssh: Path, victim: str, signum: signal.Signals, how: str
) -> None:
    gone = lost_by(tmp_path, SOON, lambda remote, hello: send(getattr(hello, victim), signum))
    assert (gone.because, gone.how) == ("signal", how)
    assert "it was ended there" in (error_of(gone, tmp_path, SOON).cause or "")


def test_without_a_lease_silence_is_no_reason(tmp_path: Path) -> None:
    """On one machine: a launcher held by Ctrl-Z must not end its deployment. What ends it is the pipe."""
    with mute_launcher(tmp_path) as popen:
        engine = order(popen, "import time; time.sleep(600)")
        with pytest.raises(subprocess.TimeoutExpired):
            popen.wait(2)
        assert engine.alive()


def test_after_a_term_from_outside_all_stops_fit_its_time(tmp_path: Path) -> None:
    """Slurm's KillWait: the plan would give this process ten minutes."""
    with mute_launcher(tmp_path, "--term-seconds", "1") as popen:
        engine = order(popen, IGNORES_TERM, stop_seconds=600)
        log = tmp_path / "logs" / "engine@here.log"
        while not (log.exists() and "deaf" in log.read_text()):
            select.select([], [], [], 0.01)
        popen.send_signal(signal.SIGTERM)
        stopped = events(popen, "stopped")
        assert stopped["forced"] is True
        assert popen.wait(LIMIT) == 0
        assert not engine.alive()


def test_requests_are_made_on_the_agents_node(tmp_path: Path, port: int) -> None:
    async def scenario() -> None:
        async with agent(tmp_path) as under_test:
            under_test.link.send(Start(token=TOKEN, process=planned("web", HTTP_SERVER, str(port), port=port)))
            await under_test.expect(Started)
            await under_test.expect(Ready)
            answer = await under_test.link.ask("GET", f"http://127.0.0.1:{port}/x", seconds=60)
            assert (answer.status, answer.body) == (200, "ok")
            posted = await under_test.link.ask("POST", f"http://127.0.0.1:{port}/x", body="{}", seconds=60)
            assert posted.status == 501
        after = await under_test.link.ask("GET", f"http://127.0.0.1:{port}/x", seconds=1)
        assert after.status is None

    asyncio.run(scenario())


def test_a_request_without_an_answer_has_its_reason(tmp_path: Path) -> None:
    async def scenario() -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            port = silent.getsockname()[1]
            async with agent(tmp_path) as under_test:
                await under_test.expect(Hello)
                late = await under_test.link.ask("GET", f"http://127.0.0.1:{port}/", seconds=0.2)
        assert (late.status, late.refused) == (None, False)
        assert "0.2 s" in late.error

    asyncio.run(scenario())


def test_events_after_the_loss_are_not_believed(tmp_path: Path, ssh: Path) -> None:
    async def scenario(remote: Remote, hello: Hello) -> None:
        remote.link.send(Start(token=TOKEN, process=planned("engine", "import time; time.sleep(600)")))
        await remote.expect(Started)
        send(hello.agent, signal.SIGSTOP)
        await remote.expect(Gone)
        send(hello.agent, signal.SIGCONT)
        assert await remote.link.close(LIMIT)

    assert not [event for event in run_with(tmp_path, SOON, scenario).events if isinstance(event, Stopped)]


def test_an_answer_that_is_long_in_coming_does_not_delay_the_end(tmp_path: Path) -> None:
    async def scenario() -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            url = f"http://127.0.0.1:{silent.getsockname()[1]}/"
            async with agent(tmp_path) as under_test:  # which closes the link within LIMIT
                pending = asyncio.create_task(under_test.link.ask("GET", url, seconds=600))
                accepted, _ = await asyncio.get_running_loop().run_in_executor(None, silent.accept)
            accepted.close()
            assert (await pending).status is None

    asyncio.run(scenario())
