"""A real agent under test: its link, its events, and processes to give it."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

from pdserve.plan.node import Node
from pdserve.plan.process import Env, HttpProbe, Process
from pdserve.reach.agent_start import open_agent
from pdserve.reach.link import AgentLink
from pdserve.reach.protocol import Event
from pdserve.recipe.model import Timeouts
from pdserve.system.process import new_token

EventT = TypeVar("EventT")
LIMIT = 120
"""Seconds until a test gives up waiting: a limit, not a measurement."""

HTTP_SERVER = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(b"ok")
    def log_message(self, *args): pass
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
NEVER_READY = "import time; print('thinking', flush=True); time.sleep(600)"


def planned(name: str, code: str, *args: str, port: int = 1, ready_seconds: float = 60, stop_stage: int = 0) -> Process:
    """A process of a plan that runs a line of Python."""
    return Process(
        name=name,
        role="decode",
        node="here",
        argv=(sys.executable, "-c", code, *args),
        env=Env(),
        ports={"http": port},
        log=f"logs/{name}@here.log",
        probe=HttpProbe(host="127.0.0.1", port=port, path="/health"),
        start_stage=0,
        stop_stage=stop_stage,
        ready_seconds=ready_seconds,
        stop_seconds=5,
    )


TOKEN = new_token()
"""Of all runs of this worker: others beside it must not take its processes for what a run has left."""


class AgentUnderTest:
    """Events in the order in which the agent sent them."""

    def __init__(self, run_dir: Path) -> None:
        self.events: list[Event] = []
        self._arrived = asyncio.Event()
        self.link: AgentLink = open_agent(Node(name="here"), run_dir, "run-1", Timeouts(), self._receive)

    def _receive(self, event: Event) -> None:
        self.events.append(event)
        self._arrived.set()

    async def expect(self, kind: type[EventT], name: str | None = None) -> EventT:
        """The first event of a kind (and process); waits for it."""
        while True:
            for event in self.events:
                if isinstance(event, kind) and name in (None, getattr(event, "name", None)):
                    return event
            self._arrived.clear()
            await asyncio.wait_for(self._arrived.wait(), LIMIT)


@asynccontextmanager
async def agent(run_dir: Path) -> AsyncIterator[AgentUnderTest]:
    """An agent that is gone, with everything that it started, when the block ends."""
    under_test = AgentUnderTest(run_dir)
    try:
        yield under_test
    finally:
        assert await under_test.link.close(LIMIT), "the guard did not leave"
