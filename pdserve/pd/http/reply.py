"""The answer to one request, written straight to its connection."""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus
from typing import Final

from mypy_extensions import mypyc_attr

Headers = list[tuple[bytes, bytes]]

_STATUS_LINES: Final = {status.value: b"HTTP/1.1 %d %b\r\n" % (status, status.phrase.encode()) for status in HTTPStatus}
_NO_BODY: Final = frozenset((204, 304))
_SIZES: Final = tuple(b"%x\r\n" % size for size in range(1024))
"""The line before a chunk. Nearly every event of a stream is this short, and to format a number takes longer than all
the rest of a write."""
_LINE_END: Final = b"\r\n"


@mypyc_attr(allow_interpreted_subclasses=True)
class ReplyConnection:
    """Base class of the connection that a reply is written to. No Protocol: compiled, a call through one looks the
    method up by its name, each time."""

    __slots__ = ("congested",)

    congested: bool
    """The client does not read: what is written waits in our memory."""

    def send(self, data: bytes) -> None:
        raise NotImplementedError

    def replied(self, reply: HttpReply) -> None:
        """The reply has ended."""
        raise NotImplementedError

    def abort(self) -> None:
        """Closes at once; what is unsent is lost."""
        raise NotImplementedError

    def reset(self) -> None:
        """Ends it so that this cannot look like a good end."""
        raise NotImplementedError


class HttpReply:
    """Takes what a handler answers. Everything written after the client has gone is dropped: `gone` is True then."""

    __slots__ = (
        "_chunked",
        "_connection",
        "_head",
        "_head_only",
        "_http10",
        "ended",
        "gone",
        "keep_alive",
        "on_gone",
        "on_pressure",
        "started",
    )

    def __init__(self, connection: ReplyConnection, *, keep_alive: bool, head_only: bool, http10: bool) -> None:
        self._connection = connection
        self._head: bytes | None = None
        self._chunked = False
        self._head_only = head_only
        self._http10 = http10
        self.keep_alive = keep_alive
        self.started = False
        """The status is decided: whatever goes wrong from now on cannot have one of its own."""
        self.ended = False
        self.gone = False
        self.on_gone: Callable[[], None] | None = None
        """Called once when the client's connection is lost before the end of the reply."""
        self.on_pressure: Callable[[bool], None] | None = None
        """Called with True when the client does not read what it is sent, and with False when it does again."""

    @property
    def congested(self) -> bool:
        """The client is behind: what is written now waits in our memory."""
        return self._connection.congested

    def start(self, status: int, headers: Headers, length: int | None = None) -> None:
        """Status and headers; they leave together with the first data. `length`: bytes, None when not known."""
        self.started = True
        head = _STATUS_LINES.get(status) or b"HTTP/1.1 %d\r\n" % status
        for name, value in headers:
            head += name + b": " + value + _LINE_END
        if length is not None:
            # To format a number into bytes takes twice as long.
            head += b"content-length: " + str(length).encode() + _LINE_END
        elif self._http10:
            self.keep_alive = False
        elif status not in _NO_BODY:
            self._chunked = True
            head += b"transfer-encoding: chunked\r\n"
        if not self.keep_alive:
            head += b"connection: close\r\n"
        elif self._http10:
            head += b"connection: keep-alive\r\n"
        self._head = head + _LINE_END

    def write(self, data: bytes) -> None:
        """Some of the body. Nothing at all is written for an empty chunk, which would mean the end."""
        if self.gone or self.ended:
            return
        if self._head is not None:
            head, self._head = self._head, None
            self._connection.send(head + self._framed(data))
        elif self._chunked:
            self._connection.send(_chunk(data))
        elif not self._head_only:
            self._connection.send(data)

    def end(self, data: bytes = b"") -> None:
        """The rest of the body, and the end of the reply."""
        if self.gone or self.ended:
            return
        head, self._head = self._head or b"", None
        last = head + self._framed(data) if data else head
        if self._chunked and not self._head_only:
            last += b"0\r\n\r\n"
        if last:
            self._connection.send(last)
        self.ended = True
        # Or who answers and the reply would keep each other until the collector comes.
        self.on_gone = self.on_pressure = None
        self._connection.replied(self)

    def cut(self) -> None:
        """Ends the reply so that the client sees that something is missing: the connection is closed in the middle."""
        if not (self.gone or self.ended):
            self.ended = True
            self.on_gone = self.on_pressure = None
            if self._http10:
                # Its end of the body is the end of the connection.
                self._connection.reset()
            else:
                self._connection.abort()

    def lost(self) -> None:
        """Called by the connection when the client has gone."""
        if self.gone or self.ended:
            return
        self.gone = True
        on_gone = self.on_gone
        self.on_gone = self.on_pressure = None
        if on_gone is not None:
            on_gone()

    def _framed(self, data: bytes) -> bytes:
        if self._head_only or not data:
            return b""
        return _chunk(data) if self._chunked else data


class ReplyWithHeaders(HttpReply):
    """One that has headers beside those of who answers."""

    __slots__ = ("_more",)

    def __init__(
        self, connection: ReplyConnection, more: Headers, *, keep_alive: bool, head_only: bool, http10: bool
    ) -> None:
        super().__init__(connection, keep_alive=keep_alive, head_only=head_only, http10=http10)
        self._more = more

    def start(self, status: int, headers: Headers, length: int | None = None) -> None:
        super().start(status, headers + self._more, length)


def _chunk(data: bytes) -> bytes:
    size = len(data)
    return (_SIZES[size] if size < len(_SIZES) else b"%x\r\n" % size) + data + _LINE_END
