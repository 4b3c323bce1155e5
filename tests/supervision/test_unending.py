"""A process that lives on after a KILL, because a device holds it in the kernel."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import pytest

from pdserve.node.agent import Agent
from pdserve.reach.protocol import Died, Start, Started, Stopped
from pdserve.system import process as system
from pdserve.system.cgroup import Made
from pdserve.system.shared_memory import ShmLedger, existing
from tests.supervision.agents import NEVER_READY, TOKEN, planned

pytestmark = pytest.mark.process

EventT = TypeVar("EventT")


class Recording(Agent):
    """An agent whose events stay here."""

    def __init__(self, folder: Path) -> None:
        ledger = ShmLedger(folder / "shm.json", strangers=existing())
        super().__init__(node="here", run_dir=folder, run_id="run-1", ledger=ledger, cgroups=Made(None))
        self.said: list[object] = []

    def _emit(self, event: object) -> None:
        self.said.append(event)

    def last(self, kind: type[EventT]) -> EventT:
        """The event that came last, which is of that kind."""
        event = self.said[-1]
        assert isinstance(event, kind)
        return event


@contextmanager
def kernel_that_ends_nobody() -> Iterator[None]:
    """No signal has an effect meanwhile."""
    with pytest.MonkeyPatch.context() as kernel:
        kernel.setattr(system, "send", lambda target, signum: False)
        kernel.setattr(system, "_KILL_SECONDS", 0.1)
        kernel.setattr(system, "_EMPTY_SECONDS", 0.1)
        yield


def test_it_is_said_and_no_other_life_is_started_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.pipe()
    order = Start(token=TOKEN, process=planned("decode-0", NEVER_READY))

    async def scenario(agent: Recording) -> None:
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

    async def with_an_agent() -> None:
        with os.fdopen(write, "w") as stdout:
            with monkeypatch.context() as context:
                context.setattr(sys, "stdout", stdout)
                agent = Recording(tmp_path)
            try:
                await scenario(agent)
            finally:
                for event in agent.said:
                    if isinstance(event, Started):
                        system.send(event.id, signal.SIGKILL)
                await agent._stop("decode-0", 0.1)
                agent._writer.close()
                await agent._http.close()

    asyncio.run(with_an_agent())
    os.close(read)
