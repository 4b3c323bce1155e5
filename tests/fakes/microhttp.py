"""A very small asyncio HTTP/1.1 server for the fakes: Content-Length bodies in, plain or chunked replies out.

A handler runs as a task that is cancelled when its client closes the connection, as vLLM aborts a request.
"""

from __future__ import annotations

import asyncio
import json
import traceback
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any
from urllib.parse import parse_qsl, urlsplit


@dataclass
class Request:
    """One request, read completely."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: bytes


class Responder:
    """Writes exactly one reply: `send` for a whole one, or `open_stream`, `chunk`..., `close_stream`."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self.started = False
        self.drops_next = False
        """The connection's next request is not read."""

    async def send(self, status: int, body: bytes | str | Any, *, content_type: str = "application/json") -> None:
        """Anything but text or bytes is sent as JSON."""
        if isinstance(body, str):
            body = body.encode()
        elif not isinstance(body, bytes):
            body = json.dumps(body).encode()
        self._head(status, content_type, {"content-length": str(len(body))})
        self._writer.write(body)
        await self._writer.drain()

    async def open_stream(self, content_type: str) -> None:
        self._head(200, content_type, {"transfer-encoding": "chunked"})
        await self._writer.drain()

    async def chunk(self, data: bytes) -> None:
        self._writer.write(b"%x\r\n%b\r\n" % (len(data), data))
        await self._writer.drain()

    async def close_stream(self) -> None:
        self._writer.write(b"0\r\n\r\n")
        await self._writer.drain()

    def abort(self) -> None:
        """Drop the connection in the middle of the reply."""
        self._writer.transport.abort()

    def _head(self, status: int, content_type: str, headers: Mapping[str, str]) -> None:
        assert not self.started, "two replies to one request"
        self.started = True
        lines = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}", f"content-type: {content_type}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        self._writer.write("\r\n".join([*lines, "", ""]).encode())


Handler = Callable[[Request, Responder], Awaitable[None]]


async def serve(host: str, port: int, handler: Handler) -> asyncio.Server:
    """Listen; raises OSError when the port is taken."""

    async def connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = await _line(reader)
        try:
            while line:
                request = await _read(line, reader)
                responder = Responder(writer)
                work = asyncio.ensure_future(handler(request, responder))
                # The first line of the next request; empty as soon as the client has gone.
                following = asyncio.ensure_future(_line(reader))
                await asyncio.wait({work, following}, return_when=asyncio.FIRST_COMPLETED)
                if not work.done() and not following.result():
                    work.cancel()
                await asyncio.wait({work})
                if not work.cancelled() and (error := work.exception()) and not isinstance(error, ConnectionError):
                    traceback.print_exception(error)
                if work.cancelled() or work.exception() or writer.is_closing():
                    following.cancel()
                    break
                line = await following
                if responder.drops_next:
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    return await asyncio.start_server(connection, host, port)


async def _line(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.readline()
    except ConnectionError:
        return b""


async def _read(first: bytes, reader: asyncio.StreamReader) -> Request:
    method, target, _ = first.decode("latin-1").split(" ", 2)
    headers: dict[str, str] = {}
    while (line := await reader.readline()) not in (b"\r\n", b""):
        name, _, value = line.decode("latin-1").partition(":")
        headers[name.strip().lower()] = value.strip()
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    url = urlsplit(target)
    return Request(method, url.path, dict(parse_qsl(url.query)), headers, body)


async def get_json(url: str) -> tuple[int, Any]:
    """GET over a connection of its own; raises OSError or asyncio.IncompleteReadError when the peer goes away."""
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    try:
        target = parts.path + (f"?{parts.query}" if parts.query else "")
        writer.write(f"GET {target} HTTP/1.1\r\nhost: {parts.netloc}\r\n\r\n".encode())
        await writer.drain()
        status = int((await reader.readuntil(b"\r\n")).split(b" ")[1])
        length = 0
        while (line := await reader.readuntil(b"\r\n")) != b"\r\n":
            if line.lower().startswith(b"content-length:"):
                length = int(line.split(b":")[1])
        return status, json.loads(await reader.readexactly(length))
    finally:
        writer.close()
