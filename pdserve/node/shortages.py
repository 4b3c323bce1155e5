"""Notices that an engine lacks sockets or file descriptors, from what its processes count (patches/record.py), or
memory, from how much of it was written to swap and how much its node has read back from there since."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from pdserve.patches.mooncake.sockets import OUT_OF_SOCKETS
from pdserve.patches.record import merged_effects, read_records
from pdserve.system import procfs
from pdserve.system.pressure import SWAPPED_ENOUGH, swapped_bytes

_LOOK_SECONDS = 10.0
"""Between two looks: each reads a file of every member of the tree."""
_READ_BACK = "pswpin"
"""Of /proc/vmstat: pages that were read from swap since boot."""


class SwapUse:
    """Measures the swap of one process tree, look by look."""

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
        """Return the bytes that all processes of the node have read from swap since this was made: what is swapped out
        and never read again slows nothing down."""
        return max(0, self._pages_read() - self._from) * os.sysconf("SC_PAGE_SIZE")

    def look(self, pids: Iterable[int]) -> bool:
        """Look again; True for news: enough for the first time, or twice what it was then."""
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
        """Tell whether the node has swap: /proc/swaps has a line for each swap device below its title."""
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


QUIET_SECONDS = 10.0
"""Without a new lack: a shortage is one event, however many requests it fails."""


class SocketShortage:
    """Counts for one engine, look by look."""

    def __init__(self, folder: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin to look for a shortage of sockets. `folder`: where the engine's processes leave their records."""
        self._folder = folder
        self._clock = clock
        self._times = 0.0
        self._last_rise: float | None = None

    @property
    def lasts(self) -> bool:
        return self._last_rise is not None

    @property
    def times(self) -> int:
        """Count how often there was no socket, since the engine was started."""
        return int(self._times)

    def look(self) -> bool:
        """Look again; True if a shortage has begun, or ended, since the last time."""
        counted = merged_effects(read_records(self._folder)).values()
        before, self._times = self._times, sum(effects.get(OUT_OF_SOCKETS, 0) for effects in counted)
        lasted, now = self.lasts, self._clock()
        if self._times > before:
            self._last_rise = now
        elif self._last_rise is not None and now - self._last_rise >= QUIET_SECONDS:
            self._last_rise = None
        return self.lasts != lasted
