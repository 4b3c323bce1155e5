"""How much of a process's memory was written to swap, and how much its node has read back from there since."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from pdserve.system import procfs
from pdserve.system.pressure import SWAPPED_ENOUGH, swapped_bytes

_LOOK_SECONDS = 10.0
"""Between two looks: each reads a file of every member of the tree."""
_READ_BACK = "pswpin"
"""Of /proc/vmstat: pages that were read from swap since boot."""


class SwapUse:
    """Of one process tree, look by look."""

    def __init__(self, *, proc: Path = Path("/proc"), clock: Callable[[], float] = time.monotonic) -> None:
        self._proc = proc
        self._clock = clock
        self._next = clock()
        self._from = self._pages_read()
        self._told = SWAPPED_ENOUGH // 2
        self.swapped = 0
        """Bytes of the tree in swap, at the last look."""

    @property
    def read_back(self) -> int:
        """Bytes that all processes of the node have read from swap since this was made: what is swapped out and never
        read again slows nothing down."""
        return max(0, self._pages_read() - self._from) * os.sysconf("SC_PAGE_SIZE")

    def look(self, pids: Iterable[int]) -> bool:
        """Whether it is news: enough for the first time, or twice what it was then."""
        now = self._clock()
        if now < self._next:
            return False
        self._next = now + _LOOK_SECONDS
        if not self._has_swap():
            return False
        self.swapped = swapped_bytes(pids, self._proc)
        if self.swapped < 2 * self._told:
            return False
        self._told = self.swapped
        return True

    def _has_swap(self) -> bool:
        """/proc/swaps has a line for each swap device below its title."""
        try:
            return len(procfs.lines_of(self._proc / "swaps")) > 1
        except OSError:
            return False

    def _pages_read(self) -> int:
        try:
            lines = procfs.lines_of(self._proc / "vmstat")
        except OSError:
            return 0
        found = (line.partition(" ")[2] for line in lines if line.startswith(f"{_READ_BACK} "))
        return next((int(text) for text in found if text.isdecimal()), 0)
