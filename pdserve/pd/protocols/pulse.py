"""Notices that this process was held up: stopped, starved, or suspended with its machine.

What is read first thing afterwards may have arrived at any moment in between, so no time counts from its reading.
"""

from __future__ import annotations

import asyncio

_LATE = 2.0
"""Times the interval: later than this is no jitter."""


class RepeatingTimer:
    """Ticks in the running loop."""

    __slots__ = ("_loop", "_pause", "_seconds", "_ticked")

    def __init__(self, seconds: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._seconds = seconds
        self._ticked = self._loop.time()
        self._pause = (0.0, 0.0)
        """Begin and end of the last one."""
        self._loop.call_later(seconds, self._tick)

    def earliest(self, read: float) -> float:
        """The first moment at which something that was read at loop time `read` can have arrived."""
        begin, end = self._pause
        if begin <= read <= end + self._seconds:
            return begin
        # After a pause reading may come before the tick that notices it.
        return self._ticked if read - self._ticked > _LATE * self._seconds else read

    def _tick(self) -> None:
        now = self._loop.time()
        if now - self._ticked > _LATE * self._seconds:
            self._pause = (self._ticked, now)
        self._ticked = now
        self._loop.call_later(self._seconds, self._tick)
