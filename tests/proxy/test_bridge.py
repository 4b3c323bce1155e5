"""An ASGI application that answers in parts hears that its client has gone."""

from __future__ import annotations

import asyncio

from starlette.types import Receive, Scope, Send

from pdserve.pd.http import bridge
from pdserve.pd.http.incoming import Budget, Request
from pdserve.pd.http.reply import HttpReply, ReplyConnection


class SlowClient(ReplyConnection):
    """It reads nothing: all that it is sent waits."""

    def __init__(self) -> None:
        self.congested = True
        self.sent = asyncio.Event()

    def send(self, data: bytes) -> None:
        self.sent.set()

    def replied(self, reply: HttpReply) -> None:
        raise AssertionError("a client that has gone got an end")

    def abort(self) -> None:
        raise AssertionError("a client that has gone was closed once more")


def test_one_that_waits_for_a_slow_client_hears_it_go() -> None:
    heard: list[str] = []

    async def app(_: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200})
        await send({"type": "http.response.body", "body": b"a part", "more_body": True})
        heard.append((await receive())["type"])

    async def leave_while_it_waits() -> None:
        request, client = Request("127.0.0.1", Budget(1), tls=False), SlowClient()
        request.method, request.target = b"GET", b"/page"
        reply = HttpReply(client, keep_alive=True, head_only=False, http10=False)
        serving = asyncio.ensure_future(bridge.serve(app, request, reply))
        await client.sent.wait()
        reply.lost()
        await asyncio.wait({serving}, timeout=10)
        assert serving.done()

    asyncio.run(leave_while_it_waits())
    assert heard == ["http.disconnect"]
