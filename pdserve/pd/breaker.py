"""A worker that fails again and again is left alone for a while, then tried with one request."""

from __future__ import annotations


class Breaker:
    """Of one worker. Closed: requests pass. Open: none does, until its time is over; then one at a time may try."""

    __slots__ = ("_all_open", "_failures", "_limit", "_open_seconds", "_open_until", "_trying")

    def __init__(self, failures: int, open_seconds: float, all_open: set[Breaker]) -> None:
        """`all_open`: has this one, among others, while it is open. As long as it is empty nobody need ask."""
        self._limit = failures
        self._open_seconds = open_seconds
        self._failures = 0
        self._open_until = 0.0
        self._trying = False
        self._all_open = all_open

    def allows(self, now: float) -> bool:
        """Whether a request may go there now (loop time)."""
        return self._failures < self._limit or (now >= self._open_until and not self._trying)

    def began(self) -> None:
        """A request goes there; if the breaker was open it is the one that tries."""
        self._trying = self._failures >= self._limit

    def succeeded(self) -> None:
        if self._failures:
            self._failures = 0
            self._all_open.discard(self)
        self._trying = False

    def failed(self, now: float) -> bool:
        """True when this failure opens it. Failures are those of the worker: an answer of 4xx is a success."""
        self._failures += 1
        self._trying = False
        if self._failures < self._limit:
            return False
        self._open_until = now + self._open_seconds
        self._all_open.add(self)
        return self._failures == self._limit

    def left(self) -> None:
        """The request that went there ended without telling anything about the worker."""
        self._trying = False

    def forgotten(self) -> None:
        """Its worker was removed."""
        self._all_open.discard(self)

    @property
    def state(self) -> str:
        """closed | open: for people and metrics."""
        return "closed" if self._failures < self._limit else "open"
