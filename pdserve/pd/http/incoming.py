"""A request as it arrives, and what a client may cost while it does."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from pdserve.pd.limits.api_keys import ApiKey


@dataclass(frozen=True)
class ClientLimits:
    """Limits of what one client may cost, in bytes and seconds."""

    max_body_bytes: int = 64 * 1024 * 1024
    max_header_bytes: int = 64 * 1024
    header_seconds: float = 15.0
    """From the first byte of a request to the end of its headers."""
    body_idle_seconds: float = 30.0
    """Between two pieces of a body, and for a client that reads nothing of its answer."""
    body_seconds: float = 300.0
    """From the first byte of a body to its last, and for a client that is behind to catch up."""
    keep_alive_seconds: float = 75.0
    max_connections: int = 10_000
    write_buffer_bytes: int = 256 * 1024
    """What may wait for one client before its engine is held back."""
    max_buffered_bytes: int = 512 * 1024 * 1024
    """The most bytes of requests in memory at once, over all connections."""


_ABSOLUTE: Final = re.compile(rb"https?://([^/?#]*)", re.I)
_SMALL_BYTES: Final = 65_536
_PIECE_BYTES: Final = 16_384
"""Of a body: smaller pieces are put together, or they would take many times their size."""


class Budget:
    """Bytes of requests in memory, over all connections of the process.

    A large request may be as large as what is left beside it of seven eighths: the largest ones are turned away first.
    The last eighth is for small ones only, so that a client with large ones leaves room for them.
    """

    __slots__ = ("_for_large", "_limit", "held")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._for_large = limit - limit // 8
        self.held = 0

    def fits(self, size: int, more: int = 0) -> bool:
        """Return whether a request of that size, of which `more` bytes are not held yet, has room."""
        if self.held + more + size <= self._for_large:
            return True
        return size <= _SMALL_BYTES and self.held + more <= self._limit


class Request:
    """One request. `parts` is complete when the handler gets it; who has got it must `release` it at last."""

    __slots__ = (
        "_budget",
        "_by_name",
        "_path",
        "_tail",
        "announced",
        "body_bytes",
        "headers",
        "held",
        "key",
        "method",
        "parts",
        "peer",
        "target",
        "tls",
    )

    def __init__(self, peer: str, budget: Budget, *, tls: bool) -> None:
        self.method = b""
        self.target = b""
        self.headers: list[tuple[bytes, bytes]] = []
        """Names in lower case, in the order of their arrival."""
        self.parts: list[bytes] = []
        """The body, as it came."""
        self._tail: bytearray | None = None
        """The end of it, if it comes in small pieces."""
        self.announced = 0
        """Bytes of the body by its content-length; 0 for one in chunks, too."""
        self.body_bytes = 0
        self._budget = budget
        self.held = 0
        """Bytes of the budget that it has."""
        self.peer = peer
        self.tls = tls
        self.key: ApiKey | None = None
        """Whose it is, once that is known."""
        self._path: bytes | None = None
        self._by_name: dict[bytes, bytes] | None = None

    @property
    def path(self) -> bytes:
        """Return the target without the query, as it was sent."""
        if self._path is None:
            self._path = self.target.partition(b"?")[0]
        return self._path

    @property
    def body(self) -> bytes:
        """Return the body in one piece."""
        if len(self.parts) != 1:
            self.parts = [b"".join(self.parts)]
        return self.parts[0]

    def to_origin_form(self) -> None:
        """Take host and path out of a target that is a whole URL (RFC 9112, 3.2.2), as clients write it who take us for
        their proxy: its host counts, whatever the Host header is. Other targets stay as they are."""
        match = _ABSOLUTE.match(self.target)
        if match is None:
            return
        rest = self.target[match.end() :]
        self.target = rest if rest.startswith(b"/") else b"/" + rest
        self.headers = [(b"host", match[1]), *[pair for pair in self.headers if pair[0] != b"host"]]
        self._path = self._by_name = None

    def take(self, data: bytes) -> bool:
        """The next piece of the body; False: it is too much to be held. `taken_all` must follow the last one."""
        size = len(data)
        self.body_bytes += size
        tail = self._tail
        if not self.parts or (size >= _PIECE_BYTES and tail is None):
            self.parts.append(data)
        elif tail is None:
            self._tail = bytearray(data)
        else:
            tail += data
            if len(tail) >= _PIECE_BYTES:
                self.taken_all()
        return self.hold(size)

    def taken_all(self) -> None:
        """`parts` is complete."""
        if self._tail is not None:
            self.parts.append(bytes(self._tail))
            self._tail = None

    def hold(self, count: int) -> bool:
        """So many bytes more are in memory because of it; False: they are too many."""
        budget = self._budget
        self.held += count
        budget.held += count
        return budget.fits(self.held)

    @property
    def left(self) -> int:
        """Bytes of its body that are still to come, by its length; nothing is known of one in chunks."""
        return self.announced - self.body_bytes

    def has_body(self) -> bool:
        """Its headers announce one. For when all of them have come."""
        return self.announced > 0 or self.header(b"transfer-encoding") is not None

    def framing(self, *, keep_alive: bool) -> bytes:
        """A head that has only the framing of the body, and whether the connection stays."""
        names = (b"content-length", b"transfer-encoding")
        lines = [b"%b: %b\r\n" % pair for pair in self.headers if pair[0] in names]
        if not keep_alive:
            lines.append(b"connection: close\r\n")
        return b"POST / HTTP/1.1\r\n%b\r\n" % b"".join(lines)

    def drop_content(self) -> None:
        """It is not sent to an engine any more: body and headers leave memory. Path and key stay."""
        self.headers = []
        self.parts = []
        self._by_name = None
        self.release()

    def release(self) -> None:
        """Nothing of its body is in memory any more. A second time does nothing."""
        self._budget.held -= self.held
        self.held = 0

    def named(self) -> dict[bytes, bytes]:
        """The first value of each header; names in lower case. For when all headers have come."""
        if self._by_name is None:
            by_name: dict[bytes, bytes] = {}
            for name, value in self.headers:
                if name not in by_name:
                    by_name[name] = value
            self._by_name = by_name
        return self._by_name

    def header(self, name: bytes) -> bytes | None:
        """The first value; `name` in lower case. For when all headers have come."""
        named = self._by_name
        return (self.named() if named is None else named).get(name)
