"""All client connections of a process, with limits on everything that a client controls."""

from __future__ import annotations

import asyncio
import contextlib
import select
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Protocol

from pdserve.pd.errors import ApiError
from pdserve.pd.http.client_connection import ClientConnection
from pdserve.pd.http.incoming import Budget
from pdserve.pd.http.incoming import ClientLimits as ClientLimits
from pdserve.pd.http.incoming import Request as Request
from pdserve.pd.http.places import Places
from pdserve.pd.http.reply import Headers, HttpReply

_MOST = 256
"""Told of in one turn of the loop."""


class HangUps:
    """Watches for clients that leave. A second epoll, which the loop watches as one more file: it reports no data."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._epoll = select.epoll()
        self._gone: dict[int, Callable[[], None]] = {}
        loop.add_reader(self._epoll.fileno(), self._heard)

    def watch(self, descriptor: int, gone: Callable[[], None]) -> None:
        """`gone` is called once, when the other end has closed or reset the connection."""
        with contextlib.suppress(FileExistsError):
            self._epoll.register(descriptor, select.EPOLLRDHUP)
        self._gone[descriptor] = gone

    def forget(self, descriptor: int, gone: Callable[[], None]) -> None:
        """No more of this one. Its descriptor may be closed, and even be another one's by now."""
        if self._gone.get(descriptor) == gone:
            del self._gone[descriptor]
            with contextlib.suppress(OSError, ValueError):
                self._epoll.unregister(descriptor)

    def close(self) -> None:
        self._loop.remove_reader(self._epoll.fileno())
        self._epoll.close()

    def _heard(self) -> None:
        for descriptor, _ in self._epoll.poll(0, _MOST):
            gone = self._gone.get(descriptor)
            if gone is not None:
                self.forget(descriptor, gone)
                gone()
            else:
                with contextlib.suppress(OSError, ValueError):
                    self._epoll.unregister(descriptor)


SWEEP_SECONDS: Final = 0.5


class Handler(Protocol):
    """Answers requests. Both methods are called from the event loop and must not block."""

    def refuse(self, request: Request) -> ApiError | None:
        """Called when the headers are complete: an error ends the request without reading its body."""

    def handle(self, request: Request, reply: HttpReply) -> None:
        """Called when the request is complete. The reply may be given later. Who answers must release the request."""

    def failed(self, request: Request | None, reply: HttpReply, error: ApiError) -> None:
        """Answers an error of the request itself: malformed, too large, too slow, refused."""


@dataclass
class Front:
    """All client connections of one process (http.connection). `sweep` must be called beside them."""

    handler: Handler
    limits: ClientLimits
    probes: frozenset[bytes] = frozenset()
    """Paths that are answered also when there are too many clients."""
    headers: Callable[[Request], Headers] | None = None
    """Gives what every answer to a request has beside its own headers."""
    connections: set[ClientConnection] = field(default_factory=set)
    closing: bool = False
    """The next request of a connection is its last, and is answered so."""
    closed: bool = False
    """No connection is kept open after its reply, and no new one is taken."""
    budget: Budget = field(init=False)
    places: Places = field(default_factory=Places)
    _hang_ups: HangUps | None = None

    def __post_init__(self) -> None:
        self.budget = Budget(self.limits.max_buffered_bytes)

    def place_for_new(self, now: float) -> int:
        """Return the place that places.Places gives a new connection; `now`: loop time."""
        return self.places.for_new(self.connections, self.limits.max_connections, now)

    def sweep(self) -> None:
        """Closes connections that take too long. To be called every SWEEP_SECONDS."""
        now = asyncio.get_running_loop().time()
        for connection in [candidate for candidate in self.connections if candidate.deadline < now]:
            connection.late()

    def close_idle(self) -> None:
        """End connections with their reply from now on, and those that wait for a request at once."""
        self.closing = self.closed = True
        for connection in list(self.connections):
            connection.close_if_idle()

    def unsent(self) -> bool:
        """Something that was answered has not left this process yet."""
        return any(connection.unsent for connection in self.connections)

    def arriving(self) -> bool:
        """A part of a request is there, and the rest may come: until its own limits of time end it."""
        return any(connection.arriving for connection in self.connections)

    def watch(self, descriptor: int, gone: Callable[[], None]) -> None:
        """`gone` is called when this client leaves, although nothing is read from it."""
        if self._hang_ups is None:
            self._hang_ups = HangUps(asyncio.get_running_loop())
        self._hang_ups.watch(descriptor, gone)

    def watch_no_more(self, descriptor: int, gone: Callable[[], None]) -> None:
        if self._hang_ups is not None:
            self._hang_ups.forget(descriptor, gone)

    def abort(self) -> None:
        for connection in list(self.connections):
            connection.abort()
        if self._hang_ups is not None:
            self._hang_ups.close()
            self._hang_ups = None
