"""Hands a request to an ASGI application: everything that is not relayed goes this way."""

from __future__ import annotations

import asyncio
from typing import Any
from urllib.parse import unquote

from starlette.types import ASGIApp, Message, Scope

from pdserve.pd.http.front import Request
from pdserve.pd.http.reply import HttpReply


async def serve(app: ASGIApp, request: Request, reply: HttpReply) -> None:
    """Runs the application for one request. What it raises is the caller's to answer."""
    received = False
    gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def leave() -> None:
        if not gone.done():
            gone.set_result(None)

    reply.on_gone = leave

    async def receive() -> Message:
        nonlocal received
        if not received:
            received = True
            return {"type": "http.request", "body": request.body, "more_body": False}
        await gone
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = [(name.lower(), value) for name, value in message.get("headers", ())]
            length = next((int(value) for name, value in headers if name == b"content-length"), None)
            reply.start(message["status"], [pair for pair in headers if pair[0] != b"content-length"], length)
            return
        # No page of ours is sent in parts.
        reply.end(message.get("body", b""))

    await app(_scope(request), receive, send)


def _scope(request: Request) -> Scope:
    path, _, query = request.target.partition(b"?")
    scope: dict[str, Any] = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "http_version": "1.1",
        "method": request.method.decode("ascii"),
        "scheme": "https" if request.tls else "http",
        "path": unquote(path.decode("latin-1")),
        "raw_path": path,
        "query_string": query,
        "root_path": "",
        "headers": request.headers,
        "client": (request.peer, 0) if request.peer else None,
        "server": None,
    }
    return scope
