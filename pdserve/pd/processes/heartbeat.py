"""Signs of life of the proxy's processes: each writes the time into shared memory, and its parent looks at it.

A beat comes from the event loop: one that hangs does not beat, whatever else of its process still runs.
"""

from __future__ import annotations

import mmap
import os
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop

BEAT_SECONDS = 1.0
HUNG_SECONDS = 15.0
"""Without a beat for so long a process is given up, with the streams that it has: what takes a loop a second is no
reason, and neither is a machine on which no process gets CPU time."""
STARTING_SECONDS = 600.0
"""So long a process may be silent before it serves: its imports, from a cold and distant disk beside other load."""
_BYTES = 8


class Beats:
    """Heartbeats of the processes 0 to `count` - 1. `file`: a memfd that all of them have."""

    def __init__(self, file: int, count: int) -> None:
        self.file = file
        os.ftruncate(file, count * _BYTES)
        self._cells = memoryview(mmap.mmap(file, count * _BYTES)).cast("d")

    @staticmethod
    def create(count: int) -> Beats:
        return Beats(os.memfd_create("pdserve-proxy-beats"), count)

    def beat(self, index: int) -> None:
        self._cells[index] = time.monotonic()

    def keep(self, index: int, loop: AbstractEventLoop) -> None:
        """Beats from now on, for as long as the loop turns."""
        self.beat(index)
        loop.call_later(BEAT_SECONDS, self.keep, index, loop)

    def last(self, index: int) -> float:
        return self._cells[index]


class Vigil:
    """Notices a process that is silent while others run: what held up the parent too (a SIGSTOP of all, a suspended
    machine) is no process's fault, and each gets the whole time anew after it."""

    def __init__(self) -> None:
        self._looked = self._since = time.monotonic()

    def look(self) -> None:
        """Look at the heartbeats; to be called every BEAT_SECONDS."""
        now = time.monotonic()
        if now - self._looked > 2 * BEAT_SECONDS:
            self._since = now
        self._looked = now

    def silent(self, last: float) -> float:
        """Seconds without a beat, of those in which one could have been seen."""
        return self._looked - max(last, self._since)
