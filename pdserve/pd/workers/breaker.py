"""The breaker of a worker that fails again and again opens; after a while one request tries the worker.

It judges a worker, not a request. A worker that cannot be reached has failed. One that took a request and failed with
it (HTTP 5xx, a connection that ends before the answer) has failed only if another worker then answered the same request
(dispatch.py): otherwise the request may be to blame. And not while it answers others. So no client can take a worker
from the others with requests that crash, and the breaker of a lone worker never opens for answers that it gave.
"""

from __future__ import annotations


class CircuitBreaker:
    """The circuit breaker of one worker. Closed: requests pass. Open: none does, until its time is over; then one at a
    time may try. Times are those of the event loop."""

    __slots__ = ("_all_open", "_answered", "_failures", "_limit", "_open_seconds", "_open_until", "_trying")

    def __init__(self, failures: int, open_seconds: float, all_open: set[CircuitBreaker]) -> None:
        """`all_open`: has this one, among others, while it is open. While it is empty no breaker is open."""
        self._limit = failures
        self._open_seconds = open_seconds
        self._failures = 0
        self._answered = -open_seconds
        """When it last gave a good answer."""
        self._open_until = 0.0
        self._trying = False
        self._all_open = all_open

    def allows(self, now: float) -> bool:
        """Whether a request may go there now."""
        return self._failures < self._limit or (now >= self._open_until and not self._trying)

    def began(self) -> None:
        """A request goes there; if the breaker was open it is the one that tries."""
        self._trying = self._failures >= self._limit

    def succeeded(self, now: float) -> None:
        """It has begun a good answer."""
        self._answered = now
        self._close()
        self._trying = False

    def renewed(self) -> None:
        """It is a new engine, or one that went on: what the old one did counts no more."""
        self._answered = -self._open_seconds
        self._close()
        self._trying = False

    def unreachable(self, now: float) -> None:
        """No connection could be made."""
        self._failed(now)

    def blamed(self, now: float) -> None:
        """It failed with a request that another worker then answered."""
        if now - self._answered >= self._open_seconds or self._failures >= self._limit:
            self._failed(now)

    def left(self) -> None:
        """The request that went there ended without a verdict on the worker: its client left, the request was
        refused (4xx), or it may itself be to blame."""
        self._trying = False

    def forgotten(self) -> None:
        """Its worker was removed."""
        self._all_open.discard(self)

    @property
    def state(self) -> str:
        """closed | open: for people and metrics."""
        return "closed" if self._failures < self._limit else "open"

    def _failed(self, now: float) -> None:
        self._failures += 1
        self._trying = False
        if self._failures >= self._limit:
            self._open_until = now + self._open_seconds
            self._all_open.add(self)

    def _close(self) -> None:
        if self._failures:
            self._failures = 0
            self._all_open.discard(self)
