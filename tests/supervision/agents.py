"""A real agent under test: its link, its events, and processes to give it."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

from pdserve.plan.node import Node
from pdserve.plan.process import Env, HttpProbe, Process
from pdserve.reach.link import AgentLink, Channel, open_agent
from pdserve.reach.protocol import Event, Start, Started, Stop, Stopped
from pdserve.recipe.model import Timeouts
from pdserve.system.process import new_token
from pdserve.system.procfs import ProcessId

EventT = TypeVar("EventT")
HERE = Node(name="here")
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


def planned(
    name: str, code: str, *args: str, port: int = 1, ready_seconds: float = 60, stop_seconds: float = 1
) -> Process:
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
        stop_stage=0,
        ready_seconds=ready_seconds,
        stop_seconds=stop_seconds,
    )


TOKEN = new_token()
"""Of all runs of this worker: others beside it must not take its processes for what a run has left."""


class Events:
    """What was reported, in order; who waits for more is woken by it."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._arrived = asyncio.Event()

    def receive(self, event: Event) -> None:
        self.events.append(event)
        self._arrived.set()

    def all(self, kind: type[EventT], name: str | None = None) -> list[EventT]:
        """Return those of a kind (and process) so far."""
        of_kind = [event for event in self.events if isinstance(event, kind)]
        return [event for event in of_kind if name in (None, getattr(event, "name", None))]

    async def expect(self, kind: type[EventT], name: str | None = None) -> EventT:
        """Return the first one of a kind (and process); wait for it."""
        while not (events := self.all(kind, name)):
            self._arrived.clear()
            await asyncio.wait_for(self._arrived.wait(), LIMIT)
        return events[0]


class AgentUnderTest(Events):
    """A real agent, and what it reports."""

    def __init__(self, run_dir: Path, node: Node, timeouts: Timeouts) -> None:
        super().__init__()
        self.link: AgentLink = open_agent(node, self.receive, run_dir=run_dir, run_id="run-1", timeouts=timeouts)

    async def start(self, process: Process) -> ProcessId:
        """Order a start; return who was started."""
        self.link.send(Start(token=TOKEN, process=process))
        return (await self.expect(Started, process.name)).id

    async def stop(self, name: str) -> Stopped:
        """Order a stop; return the answer to it."""
        self.link.send(Stop(name=name, grace=5))
        return await self.expect(Stopped, name)


@asynccontextmanager
async def agent(
    run_dir: Path,
    node: Node = HERE,
    timeouts: Timeouts = Timeouts(),  # noqa: B008 (nobody changes it)
) -> AsyncIterator[AgentUnderTest]:
    """An agent that is gone, with everything that it started, when the block ends."""
    under_test = AgentUnderTest(run_dir, node, timeouts)
    try:
        yield under_test
    finally:
        assert await under_test.link.close(LIMIT), "the guard did not leave"


class LinkUnderTest(Events):
    """A link to a program that plays an agent."""

    def __init__(self, argv: Sequence[str], **options: Any) -> None:
        super().__init__()
        self.popen = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.link = AgentLink("a", Channel(self.popen), self.receive, **options)


@asynccontextmanager
async def linked(script: str, *arguments: str, **options: Any) -> AsyncIterator[LinkUnderTest]:
    """A link to a line of Python; `options`: of the link."""
    under_test = LinkUnderTest([sys.executable, "-S", "-c", script, *arguments], **options)
    try:
        yield under_test
    finally:
        assert await under_test.link.close(LIMIT)
        assert under_test.popen.stdout is not None
        under_test.popen.stdout.close()


async def until(true: Callable[[], bool]) -> None:
    """Wait for what another process does."""
    async with asyncio.timeout(LIMIT):
        while not true():
            await asyncio.sleep(0.01)


async def until_gone(*identities: ProcessId) -> None:
    await until(lambda: not any(identity.alive() for identity in identities))


async def pid_in(file: Path) -> int:
    """Return the PID that a process writes there, once it has."""
    await until(lambda: file.exists() and file.read_text() != "")
    return int(file.read_text())
