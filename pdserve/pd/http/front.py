"""Client connections: HTTP/1.1 requests in, replies out, with limits on everything that a client controls.

One Connection is one asyncio protocol over httptools' parser. A request reaches the handler when it is complete; a
handler may refuse it as soon as its headers are there. Requests of one connection are answered one after the other.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol, cast

import httptools

from pdserve.pd.errors import ApiError
from pdserve.pd.http.reply import Reply
from pdserve.pd.keys import ApiKey

_SWEEP_SECONDS = 0.5
_LINGER_SECONDS = 2.0
_MAX_PIPELINED = 8
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


@dataclass(frozen=True)
class Limits:
    """What one client may cost. Bytes and seconds."""

    max_body_bytes: int = 64 * 1024 * 1024
    max_header_bytes: int = 64 * 1024
    header_seconds: float = 15.0
    """From the first byte of a request to the end of its headers."""
    body_idle_seconds: float = 30.0
    """Between two pieces of a body, and for a client that does not read its answer."""
    keep_alive_seconds: float = 75.0
    max_connections: int = 10_000
    write_buffer_bytes: int = 256 * 1024
    """What may wait for one client before its engine is held back."""


class Request:
    """One request. `body` is complete when the handler gets it."""

    __slots__ = ("_path", "body", "body_bytes", "headers", "key", "method", "peer", "target", "tls")

    def __init__(self, peer: str, *, tls: bool) -> None:
        self.method = b""
        self.target = b""
        self.headers: list[tuple[bytes, bytes]] = []
        """Names in lower case, in the order of their arrival."""
        self.body = b""
        self.body_bytes = 0
        self.peer = peer
        self.tls = tls
        self.key: ApiKey | None = None
        """Whose it is, once that is known."""
        self._path: bytes | None = None

    @property
    def path(self) -> bytes:
        """Without the query, as it was sent."""
        if self._path is None:
            self._path = self.target.partition(b"?")[0]
        return self._path

    def header(self, name: bytes) -> bytes | None:
        """The first value; `name` in lower case."""
        for found, value in self.headers:
            if found == name:
                return value
        return None


class Handler(Protocol):
    """Who answers. Both are called from the event loop and must not block."""

    def refuse(self, request: Request) -> ApiError | None:
        """Called when the headers are complete: an error ends the request without reading its body."""

    def handle(self, request: Request, reply: Reply) -> None:
        """Called when the request is complete. The reply may be given later."""

    def failed(self, request: Request | None, reply: Reply, error: ApiError) -> None:
        """Answers an error of the request itself: malformed, too large, too slow, refused."""


@dataclass
class Front:
    """All client connections of one process. `sweep` must run beside them."""

    handler: Handler
    limits: Limits
    connections: set[Connection] = field(default_factory=set)
    closing: bool = False
    """No connection is kept open after its reply."""

    def __call__(self) -> Connection:
        """A protocol factory for loop.create_server."""
        return Connection(self)

    async def sweep(self) -> None:
        """Closes connections that take too long. Runs until it is cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(_SWEEP_SECONDS)
            now = loop.time()
            for connection in [one for one in self.connections if one.deadline < now]:
                connection.late()

    def close_idle(self) -> None:
        """From now on connections end with their reply; those that wait for a request end at once."""
        self.closing = True
        for connection in list(self.connections):
            connection.close_if_idle()

    def unsent(self) -> bool:
        """Something that was answered has not left this process yet."""
        return any(connection.unsent for connection in self.connections)

    def abort(self) -> None:
        for connection in list(self.connections):
            connection.abort()


class Connection(asyncio.Protocol):
    """One client. Owned by its transport; `front.connections` has it while it is open."""

    __slots__ = (
        "_body",
        "_current",
        "_expects",
        "_front",
        "_header_bytes",
        "_loop",
        "_parser",
        "_paused_reading",
        "_peer",
        "_ready",
        "_refused",
        "_reply",
        "_tls",
        "_transport",
        "congested",
        "deadline",
    )

    def __init__(self, front: Front) -> None:
        self._front = front
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport
        self._peer = ""
        self._tls = False
        self._current: Request | None = None
        """The request that is arriving."""
        self._body: list[bytes] = []
        self._header_bytes = 0
        self._expects = False
        self._refused = False
        self._ready: deque[tuple[Request, Reply]] = deque()
        """Complete requests that wait for the reply before theirs."""
        self._reply: Reply | None = None
        self._paused_reading = False
        self.congested = False
        self.deadline = self._loop.time() + front.limits.header_seconds

    # --- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        front = self._front
        if len(front.connections) >= front.limits.max_connections or front.closing:
            self._transport.close()
            return
        front.connections.add(self)
        self._transport.set_write_buffer_limits(high=front.limits.write_buffer_bytes)
        peer = transport.get_extra_info("peername")
        self._peer = str(peer[0]) if isinstance(peer, tuple) else ""
        self._tls = transport.get_extra_info("ssl_object") is not None

    def connection_lost(self, _: Exception | None) -> None:
        self._front.connections.discard(self)
        self._ready.clear()
        if self._reply is not None:
            reply, self._reply = self._reply, None
            reply.lost()

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        if self._current is None and self._reply is None:
            self._wait(self._front.limits.header_seconds)
        elif self._current is not None and self._body:
            self._wait(self._front.limits.body_idle_seconds)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            # Nobody here speaks anything else: the request is answered as it is, and nothing is read after it.
            self._refused = True
            self._last_reply_closes()
        except httptools.HttpParserCallbackError as error:
            # What a callback raised is what httptools lets through only as the cause.
            cause = error.__context__
            self._refuse(cause if isinstance(cause, ApiError) else ApiError(400, "The request cannot be read."))
        except httptools.HttpParserError:
            self._refuse(ApiError(400, "This is not a valid HTTP/1.1 request."))

    def eof_received(self) -> bool:
        return False

    def pause_writing(self) -> None:
        self.congested = True
        self._wait(self._front.limits.body_idle_seconds)
        if self._reply is not None and self._reply.on_pressure is not None:
            self._reply.on_pressure(True)

    def resume_writing(self) -> None:
        self.congested = False
        self.deadline = float("inf")
        if self._reply is not None and self._reply.on_pressure is not None:
            self._reply.on_pressure(False)

    # --- httptools

    def on_message_begin(self) -> None:
        self._current = Request(self._peer, tls=self._tls)
        self._header_bytes = 0
        self._body = []
        self._expects = False

    def on_url(self, url: bytes) -> None:
        assert self._current is not None
        self._count_header(len(url))
        self._current.target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        assert self._current is not None
        self._count_header(len(name) + len(value) + 4)
        name = name.lower()
        if name == b"expect" and value.lower() == b"100-continue":
            self._expects = True
        self._current.headers.append((name, value))

    def on_headers_complete(self) -> None:
        request = self._current
        assert request is not None
        request.method = self._parser.get_method()
        lengths = [value for name, value in request.headers if name == b"content-length"]
        if lengths and int(lengths[0]) > self._front.limits.max_body_bytes:
            raise self._too_large()
        refusal = self._front.handler.refuse(request)
        if refusal is not None:
            raise refusal
        if self._expects and self._reply is None:
            self.send(_CONTINUE)
        self._wait(self._front.limits.body_idle_seconds)

    def on_body(self, data: bytes) -> None:
        request = self._current
        assert request is not None
        request.body_bytes += len(data)
        if request.body_bytes > self._front.limits.max_body_bytes:
            raise self._too_large()
        self._body.append(data)

    def on_message_complete(self) -> None:
        request, self._current = self._current, None
        assert request is not None
        request.body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        self._body = []
        reply = self._new_reply(request)
        if self._reply is None:
            self._serve(request, reply)
            return
        self._ready.append((request, reply))
        if len(self._ready) >= _MAX_PIPELINED and not self._paused_reading:
            self._paused_reading = True
            self._transport.pause_reading()

    # --- for Reply

    def send(self, data: bytes) -> None:
        self._transport.write(data)

    def replied(self, reply: Reply) -> None:
        """The reply has ended: the next request has its turn, or the connection waits or closes."""
        self._reply = None
        if self._refused and self._transport.can_write_eof():
            # The client may still be sending. Closing now would reset its connection before it has read the answer.
            self._transport.write_eof()
            self._wait(_LINGER_SECONDS)
            return
        if not reply.keep_alive or self._front.closing:
            self._ready.clear()
            self._transport.close()
            return
        if self._paused_reading:
            self._paused_reading = False
            self._transport.resume_reading()
        if self._ready:
            # Not from within the handler of the reply before it.
            self._loop.call_soon(self._serve_next)
        elif self._current is None:
            self._wait(self._front.limits.keep_alive_seconds)

    def abort(self) -> None:
        self._transport.abort()

    # --- for Front

    @property
    def unsent(self) -> bool:
        return self._transport.get_write_buffer_size() > 0

    def late(self) -> None:
        """The deadline has passed: an unfinished request is answered with 408, anything else is just closed."""
        if self._reply is None and self._current is not None and not self._refused:
            self._refuse(ApiError(408, "The request took too long to arrive."))
        else:
            self.abort()

    def close_if_idle(self) -> None:
        if self._reply is None and self._current is None and not self._ready:
            self._transport.close()

    # --- inside

    def _serve(self, request: Request, reply: Reply) -> None:
        self._reply = reply
        self.deadline = float("inf")
        self._front.handler.handle(request, reply)

    def _serve_next(self) -> None:
        if self._ready and self._reply is None and not self._transport.is_closing():
            self._serve(*self._ready.popleft())

    def _new_reply(self, request: Request) -> Reply:
        return Reply(
            self,
            keep_alive=self._parser.should_keep_alive() and not self._refused,
            head_only=request.method == b"HEAD",
            http10=self._parser.get_http_version() == "1.0",
        )

    def _refuse(self, error: ApiError) -> None:
        """Answers a request that will not be read to its end, after those before it; then the connection closes."""
        self._refused = True
        if self._reply is not None or self._ready:
            # Requests before it are being answered; this one gets nothing but the end of the connection.
            self._last_reply_closes()
            return
        request, self._current = self._current, None
        reply = Reply(self, keep_alive=False, head_only=False, http10=False)
        self._reply = reply
        self._wait(self._front.limits.body_idle_seconds)
        self._front.handler.failed(request, reply, error)

    def _last_reply_closes(self) -> None:
        for reply in self._replies():
            reply.keep_alive = False
        if self._reply is None:
            self._transport.close()

    def _replies(self) -> Iterator[Reply]:
        if self._ready:
            yield self._ready[-1][1]
        elif self._reply is not None:
            yield self._reply

    def _count_header(self, size: int) -> None:
        self._header_bytes += size
        if self._header_bytes > self._front.limits.max_header_bytes:
            raise ApiError(431, "The request's headers are too large.")

    def _too_large(self) -> ApiError:
        return ApiError(413, f"The request body is larger than {self._front.limits.max_body_bytes} bytes.")

    def _wait(self, seconds: float) -> None:
        self.deadline = self._loop.time() + seconds
