"""Whether an engine has run out of sockets or file descriptors, from what its processes count (patches/record.py)."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from pdserve.patches.mooncake.sockets import OUT_OF_SOCKETS
from pdserve.patches.process_records import merged_effects, read_records

QUIET_SECONDS = 10.0
"""Without a new lack: a shortage is one event, however many requests it fails."""


class SocketShortage:
    """Of one engine, look by look."""

    def __init__(self, folder: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        """`folder`: where the engine's processes leave their records."""
        self._folder = folder
        self._clock = clock
        self._times = 0.0
        self._last_rise: float | None = None

    @property
    def lasts(self) -> bool:
        return self._last_rise is not None

    @property
    def times(self) -> int:
        """How often there was no socket, since the engine was started."""
        return int(self._times)

    def look(self) -> bool:
        """Whether a shortage has begun, or ended, since the last look."""
        counted = merged_effects(read_records(self._folder)).values()
        before, self._times = self._times, sum(effects.get(OUT_OF_SOCKETS, 0) for effects in counted)
        lasted, now = self.lasts, self._clock()
        if self._times > before:
            self._last_rise = now
        elif self._last_rise is not None and now - self._last_rise >= QUIET_SECONDS:
            self._last_rise = None
        return self.lasts != lasted
