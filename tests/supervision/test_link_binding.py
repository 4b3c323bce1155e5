"""An agent speaks of its own node and of its own processes only."""

from __future__ import annotations

import asyncio

import pytest

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
from pdserve.system.procfs import ProcessId
from tests.supervision.agents import linked

pytestmark = pytest.mark.process

ID = ProcessId(pid=1, start_ticks=1)
NEWS: list[Message] = [
    Started(name="decode-0", id=ID),
    Progress(name="decode-0", text="loading"),
    Ready(name="decode-0", seconds=1),
    Died(name="decode-0", pid=1, code=1, how="exit 1", seconds=1, while_starting=False),
    Late(name="decode-0", seconds=1, last_answer="", diagnostics=""),
    Health(name="decode-0", responsive=False),
    Stopped(name="decode-0", forced=False, seconds=1),
]
OF_ANOTHER: list[Message] = [
    Hello(node="b", agent=ID, guard=ID, hostname="b"),
    SignalReceived(node="b", signal="SIGTERM"),
    Gone(node="b", how="as if"),
    *NEWS,
]


SAYS = "import sys; sys.stdin.readline(); sys.stdout.write(sys.argv[1]); sys.stdout.flush(); sys.stdin.read()"


async def heard(message: Message, *, process: str = "prefill-0") -> Message:
    """What reaches the launcher of an agent of node a that says this, after orders for one process."""
    async with linked(SAYS, line_of(message).decode()) as under_test:
        under_test.link.send(Stop(name=process, grace=1))
        return await under_test.expect(Message)


async def test_news_of_another_node_or_process_is_a_protocol_error_and_recorded_nowhere() -> None:
    for event in await asyncio.gather(*map(heard, OF_ANOTHER)):
        assert isinstance(event, Gone)
        assert event.node == "a"
        assert event.how.startswith("agent@a: an agent reported ")


async def test_news_of_a_process_of_its_orders_is_taken() -> None:
    assert await asyncio.gather(*(heard(message, process="decode-0") for message in NEWS)) == NEWS
