"""A request as it arrives, and what a client may cost while it does."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.pd.keys import ApiKey


@dataclass(frozen=True)
class Limits:
    """What one client may cost. Bytes and seconds."""

    max_body_bytes: int = 64 * 1024 * 1024
    max_header_bytes: int = 64 * 1024
    header_seconds: float = 15.0
    """From the first byte of a request to the end of its headers."""
    body_idle_seconds: float = 30.0
    """Between two pieces of a body, and for a client that does not read its answer."""
    body_seconds: float = 300.0
    """From the first byte of a body to its last."""
    keep_alive_seconds: float = 75.0
    max_connections: int = 10_000
    write_buffer_bytes: int = 256 * 1024
    """What may wait for one client before its engine is held back."""


class Request:
    """One request. `body` is complete when the handler gets it."""

    __slots__ = ("_by_name", "_path", "body", "body_bytes", "headers", "key", "method", "peer", "target", "tls")

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
        self._by_name: dict[bytes, bytes] | None = None

    @property
    def path(self) -> bytes:
        """Without the query, as it was sent."""
        if self._path is None:
            self._path = self.target.partition(b"?")[0]
        return self._path

    def header(self, name: bytes) -> bytes | None:
        """The first value; `name` in lower case. For when all headers have come."""
        if self._by_name is None:
            self._by_name = dict(reversed(self.headers))
        return self._by_name.get(name)
