"""Pooled HTTP/1.1 connections to one engine. Never through a proxy of the environment.

A Sink is what hears of one response. A connection is in use from `send` until the end of the response; then it is kept
for the next request. To give up the rest of a response is to abort the connection: that is how an engine learns
that its client has left.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections import deque
from collections.abc import Coroutine
from typing import Any, Final, cast
from urllib.parse import urlsplit

import httptools
from mypy_extensions import mypyc_attr

from pdserve.pd.http import connecting
from pdserve.pd.http.pieces import LARGE, Payload, Pieces

_FIRST: Final = 8
"""Most answers that are no streams come in fewer pieces, and are not worth a system call."""
_EVERY: Final = 64


def is_option_due(reads: int) -> bool:
    """Return whether the option is to be set at this read of an answer, counted from 1."""
    return reads % _EVERY == _FIRST


def delay(transport: asyncio.BaseTransport) -> None:
    """Sets the option on a TCP connection, if it is open."""
    sock = transport.get_extra_info("socket")
    if sock is None:
        return
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 0)
    except (OSError, ValueError):
        # It has just been closed, which uvloop answers with a ValueError.
        return


IDLE_SECONDS: Final = 2.0
"""vLLM closes an idle connection after 5 s: we leave first, or a request would race with that."""
_MAX_IDLE: Final = 256
_CONTENT_TYPE_BYTES: Final = len(b"content-type")
_MAX_HEAD_BYTES: Final = 262_144
"""What an engine may send before the body of its answer, or at once without a complete line."""


@mypyc_attr(allow_interpreted_subclasses=True)
class Sink:
    """Base class of what hears of a response. All calls come from the event loop; none may raise."""

    __slots__ = ()

    def on_status(self, status: int, content_type: str) -> None:
        raise NotImplementedError

    def on_data(self, data: bytes) -> None:
        """Some of the body, chunked coding removed; once for each read from the network."""
        raise NotImplementedError

    def on_end(self) -> None:
        """The response is complete. The connection is no longer this sink's."""
        raise NotImplementedError

    def on_sent(self) -> None:
        """The whole request has left our memory."""
        raise NotImplementedError

    def on_lost(self) -> None:
        """The connection ended first."""
        raise NotImplementedError


class UpstreamConnection:
    """One connection to an engine. Owned by its pool while it is idle, by the sink of its request otherwise."""

    __slots__ = (
        "_complete",
        "_content_type",
        "_data",
        "_hung_up",
        "_keep",
        "_loop",
        "_more",
        "_parser",
        "_paused",
        "_pool",
        "_reads",
        "_sink",
        "_transport",
        "_unheard",
        "_unsent",
        "idle_since",
    )

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport
        self._parser = httptools.HttpResponseParser(self)
        self._sink: Sink | None = None
        self._content_type = ""
        self._data = b""
        """The data of a body, out of the bytes that are being read."""
        self._more: list[bytes] = []
        """What came behind it in the same bytes."""
        self._complete = False
        self._keep = False
        self._unheard = 0
        """Bytes since the end of the last head or the last piece of a body: the rest may never end."""
        self._reads = 0
        """The number of reads of the answer that is coming."""
        self._unsent = False
        self._paused = False
        self._hung_up = False
        self.idle_since = 0.0

    def send(self, request: bytes, body: Payload, sink: Sink) -> None:
        """One request. The connection must be open and idle."""
        self._sink = sink
        self._reads = self._unheard = 0
        transport = self._transport
        if isinstance(body, Pieces):
            transport.writelines((request, *body.parts))
        elif len(body) < LARGE:
            transport.write(request + body)
        else:
            transport.writelines((request, body))
        if transport.get_write_buffer_size() == 0:
            sink.on_sent()
        else:
            self._unsent = True
            self._loop.call_soon(self._check_sent)

    def abort(self) -> None:
        """Leaves at once. The sink hears nothing more."""
        self._sink = None
        self._transport.abort()

    def cut(self) -> None:
        """Ends it as if the engine had: the sink hears that it is lost."""
        sink, self._sink = self._sink, None
        self._transport.abort()
        if sink is not None:
            sink.on_lost()

    def hang_up(self) -> None:
        """Leaves, and listens on: the engine sees its client leave, and what it has sent before still arrives. Then
        the connection ends. Over TLS nothing more arrives."""
        self._hung_up = True
        if self._transport.can_write_eof():
            self._transport.write_eof()
        else:
            self._transport.abort()

    def pause(self) -> None:
        self._paused = True
        self._transport.pause_reading()

    def resume(self) -> None:
        if self._paused and not self._transport.is_closing():
            self._transport.resume_reading()
        self._paused = False

    @property
    def open(self) -> bool:
        return not self._transport.is_closing()

    # --- StreamProtocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        # resume_writing is then called when all of a request has been sent.
        self._transport.set_write_buffer_limits(high=0)
        self._pool.opened(self)

    def pause_writing(self) -> None:
        """Do nothing: what is sent is one request."""

    def resume_writing(self) -> None:
        self._check_sent()

    def eof_received(self) -> bool | None:
        """The transport closes itself."""
        return None

    def data_received(self, data: bytes) -> None:
        if self._sink is None:
            # Nothing was asked: this engine does not speak HTTP as it should, or its client has left.
            self._transport.abort()
            return
        self._reads += 1
        if is_option_due(self._reads):
            delay(self._transport)
        self._unheard += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self.cut()
            return
        if self._unheard > _MAX_HEAD_BYTES:
            self.cut()
            return
        sink = self._sink
        if sink is None:
            return
        data, self._data = self._data, b""
        if self._more:
            parts, self._more = [data, *self._more], []
            data = b"".join(parts)
        if data:
            sink.on_data(data)
        if self._complete:
            self._finish()

    def connection_lost(self, _: Exception | None) -> None:
        self._pool.forget(self)
        sink, self._sink = self._sink, None
        if sink is not None:
            sink.on_lost()

    # --- httptools

    def on_header(self, name: bytes, value: bytes) -> None:
        if len(name) == _CONTENT_TYPE_BYTES and name.lower() == b"content-type":
            self._content_type = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status >= 200 and not self._complete:
            self._unheard = 0
            if self._sink is not None:
                self._sink.on_status(status, self._content_type or "application/json")

    def on_body(self, data: bytes) -> None:
        if not self._complete:
            self._unheard = 0
            if self._data:
                self._more.append(data)
            else:
                self._data = data

    def on_message_complete(self) -> None:
        if self._parser.get_status_code() >= 200:
            # Only now: the parser forgets it. An engine that sends more than was asked is not asked again.
            self._keep = self._parser.should_keep_alive() and not self._complete
            self._complete = True
        self._content_type = ""

    # --- inside

    def _finish(self) -> None:
        sink, self._sink = self._sink, None
        self._complete = False
        if self._keep and not self._unsent and not self._hung_up and not self._transport.is_closing():
            # The client may have fallen behind with the last of it: the next request's answer must not wait for it.
            if self._paused:
                self.resume()
            self._pool.keep(self)
        else:
            self._transport.close()
        if sink is not None:
            sink.on_end()

    def _check_sent(self) -> None:
        if self._unsent and self._transport.get_write_buffer_size() == 0:
            self._unsent = False
            if self._sink is not None:
                self._sink.on_sent()


class Pool:
    """The connections to one origin."""

    def __init__(self, url: str, *, connect_timeout: float, tls: ssl.SSLContext | None = None) -> None:
        """`url`: http(s)://host:port. `tls` is used for https; None means the system's own trust."""
        parts = urlsplit(url)
        self._secure = parts.scheme == "https"
        self._host = parts.hostname or ""
        self._port = parts.port or (443 if self._secure else 80)
        self._tls = (tls or ssl.create_default_context()) if self._secure else None
        self._connect_timeout = connect_timeout
        self._idle: deque[UpstreamConnection] = deque()
        self._open: set[UpstreamConnection] = set()
        self._most_idle = _MAX_IDLE
        self._loop = asyncio.get_running_loop()
        self.host_header = parts.netloc.encode("idna" if not parts.netloc.isascii() else "ascii")

    def now(self) -> float:
        """Loop time. Quicker than to ask for the running loop, which costs CPython 3.11 a system call."""
        return self._loop.time()

    def take(self) -> UpstreamConnection | None:
        """An idle connection that is still fresh."""
        oldest = self._loop.time() - IDLE_SECONDS
        while self._idle:
            connection = self._idle.pop()
            if connection.open and connection.idle_since >= oldest:
                return connection
            connection.abort()
        return None

    def connect(self) -> Coroutine[Any, Any, UpstreamConnection]:
        """A new one. Raises OSError (TimeoutError among them, and TLS errors) when it cannot be had."""
        return connecting.connect(self._new, self._host, self._port, tls=self._tls, timeout=self._connect_timeout)

    def keep(self, connection: UpstreamConnection) -> None:
        """Its response is complete: it may serve again."""
        connection.idle_since = self._loop.time()
        self._idle.append(connection)
        oldest = connection.idle_since - IDLE_SECONDS
        while self._idle and (len(self._idle) > self._most_idle or self._idle[0].idle_since < oldest):
            self._idle.popleft().abort()

    def opened(self, connection: UpstreamConnection) -> None:
        """Note a connection that is open. Not before: uvloop makes the protocol of an attempt that then fails, too."""
        self._open.add(connection)

    def forget(self, connection: UpstreamConnection) -> None:
        self._open.discard(connection)

    def retire(self) -> None:
        """Keeps no connection that is not in use, from now on."""
        self._most_idle = 0
        while self._idle:
            self._idle.popleft().abort()

    def close(self) -> None:
        """Aborts every connection, in use or not."""
        for connection in list(self._open):
            connection.cut()
        self._idle.clear()

    def _new(self) -> UpstreamConnection:
        return UpstreamConnection(self)
