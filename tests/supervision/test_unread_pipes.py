"""What does not go on: who does not read, who has ended, whom no signal ends. Nobody is held by it."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from pdserve.node.agent import Agent
from pdserve.reach.protocol import Died, Gone, Progress, Pulse, Push, Start, Started, Stopped
from pdserve.system import process as system
from pdserve.system.cgroup import CgroupOutcome
from pdserve.system.shared_memory import ShmLedger, segment_inodes
from tests.supervision.agents import NEVER_READY, TOKEN, EventT, linked, planned

MEGABYTE = 1024 * 1024


class AgentHere(Agent):
    """An agent in this process. What it reports stays here too."""

    def __init__(self, folder: Path) -> None:
        ledger = ShmLedger(folder / "shm.json", strangers=segment_inodes())
        super().__init__(node="here", run_dir=folder, run_id="run-1", ledger=ledger, cgroups=CgroupOutcome(None))
        self.said: list[object] = []

    def _emit(self, event: Any) -> None:
        self.said.append(event)
        super()._emit(event)

    def last(self, kind: type[EventT]) -> EventT:
        """The event that came last, which is of that kind."""
        event = self.said[-1]
        assert isinstance(event, kind)
        return event


@asynccontextmanager
async def agent_here(folder: Path) -> AsyncIterator[AgentHere]:
    """An agent whose launcher does not read."""
    read, write = os.pipe()
    with os.fdopen(write, "w") as stdout, os.fdopen(read):
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(sys, "stdout", stdout)
            agent = AgentHere(folder)
        try:
            yield agent
        finally:
            for event in agent.said:
                if isinstance(event, Started):
                    system.send(event.id, signal.SIGKILL)
            await agent._stop("decode-0", 0.1)
            agent._writer.close()
            await agent._http.close()


async def test_news_that_the_next_makes_worthless_do_not_wait_for_a_launcher_that_does_not_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with agent_here(tmp_path) as agent:
        agent._emit(Progress(name="prefill-0", text="x" * 2 * MEGABYTE))
        waiting = agent._writer.waiting
        for _ in range(1000):
            agent._emit(Pulse())
            agent._emit(Progress(name="prefill-0", text="loading"))
        assert agent._writer.waiting == waiting
        # What happened is told, however late.
        agent._emit(Stopped(name="prefill-0", forced=False, seconds=1))
        assert agent._writer.waiting > waiting
    assert capsys.readouterr().err.count("the launcher does not read") == 1


@contextmanager
def kernel_that_ends_nobody() -> Iterator[None]:
    """No signal has an effect meanwhile, as on a process that a device holds in the kernel."""
    with pytest.MonkeyPatch.context() as kernel:
        kernel.setattr(system, "send", lambda target, signum: False)
        kernel.setattr(system, "_KILL_SECONDS", 0.1)
        kernel.setattr(system, "_EMPTY_SECONDS", 0.1)
        yield


@pytest.mark.process
async def test_that_a_process_lives_on_after_a_kill_is_said_and_no_other_life_is_started_beside_it(
    tmp_path: Path,
) -> None:
    order = Start(token=TOKEN, process=planned("decode-0", NEVER_READY))
    async with agent_here(tmp_path) as agent:
        agent._start(order)
        started = agent.last(Started)
        with kernel_that_ends_nobody():
            await agent._stop("decode-0", 0.1)
        assert agent.last(Stopped).left == (started.id.pid,)
        agent._start(order)
        assert agent.last(Died).how == "could not be started: an earlier life of it was not stopped"
        await agent._stop("decode-0", 0.1)
        assert agent.last(Stopped).left == ()
        agent._start(order)
        assert agent.last(Started).id != started.id


CUT = '{"event":"progress","name":"prefill-0","text":"loading wei'


@pytest.mark.process
@pytest.mark.parametrize(
    ("last", "because", "how"),
    [
        (CUT + '{"event":"leaving","because":"killed","how":"it was killed by SIGKILL"}\n', "killed", "it was killed"),
        (CUT, None, "its pipe closed"),
        ('{"ev', None, "its pipe closed"),
        ('{"event":"nothing"}\n', None, "another version of pdserve"),
        ("This account is closed.", None, "another version of pdserve"),
    ],
)
async def test_an_agent_that_ends_in_the_middle_of_a_line_is_no_other_version(
    last: str, because: str | None, how: str
) -> None:
    async with linked("import sys; sys.stdout.write(sys.argv[1])", last) as under_test:
        gone = await under_test.expect(Gone)
    assert (gone.because, how in gone.how) == (because, True), gone.how


@pytest.mark.process
async def test_an_agent_that_does_not_read_its_orders_is_asked_nothing_more() -> None:
    async with linked("import time; time.sleep(600)") as under_test:
        under_test.link.send(Push(name="proxy", about="prefill-0", line="x" * 2 * MEGABYTE))
        answered = await under_test.link.ask("GET", "http://127.0.0.1:1/", seconds=60)
        under_test.popen.kill()
    assert answered.error == "the agent of a does not read its orders"
    assert len(under_test.events) == len(under_test.all(Gone))
