"""From when to when a PID was that of a process of ours: the kernel gives the number to others before and after.

What a process has made often has its maker's number alone, when the process is long gone.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

from pdserve.system import procfs
from pdserve.system.procfs import ProcessId

_CLOCK_SECONDS = 2.0
"""By which two accounts of when something happened may differ."""
_REMEMBERED_SECONDS = 60.0
"""How long one that has ended is remembered: by then what it has made was looked at many times."""

Kept = list[tuple[int, int, float, float | None]]
"""As JSON: PID, start in clock ticks, wall-clock seconds of its beginning and of its end."""


@dataclass
class _Life:
    began: float
    ended: float | None = None
    """By when it had, at the latest; None: it has not been missed yet."""
    forgotten: float | None = None
    """Monotonic seconds."""


class Lives:
    """Of the processes that were seen at a look; one that came and went between two looks is not among them."""

    def __init__(self, kept: Kept, until: float) -> None:
        """`kept`: by an earlier look, and no longer than `until` (wall-clock seconds)."""
        self._lives = {ProcessId(pid=pid, start_ticks=ticks): _Life(began, ended) for pid, ticks, began, ended in kept}
        for process, life in self._lives.items():
            if life.ended is None and not process.alive():
                life.ended = until

    def kept(self) -> Kept:
        """All that is remembered."""
        return [(process.pid, process.start_ticks, life.began, life.ended) for process, life in self._lives.items()]

    def see(self, pids: Iterable[int]) -> bool:
        """These are ours and live now. True when that changes what is remembered."""
        clock, known = time.monotonic(), len(self._lives)
        changed = False
        for process, life in list(self._lives.items()):
            if life.ended is None and not process.alive():
                life.ended, changed = time.time(), True
            if life.ended is not None and life.forgotten is None:
                life.forgotten = clock + _REMEMBERED_SECONDS
            elif life.forgotten is not None and clock > life.forgotten:
                del self._lives[process]
                known -= 1
        for process in procfs.identities(pids):
            if process not in self._lives:
                self._lives[process] = _Life(procfs.started_at(process))
        return changed or len(self._lives) != known

    def of(self, pid: int, when: float) -> ProcessId | None:
        """Who of ours had this PID at that wall-clock time; None: none."""
        for process, life in self._lives.items():
            until = time.time() if life.ended is None else life.ended
            if process.pid == pid and life.began - _CLOCK_SECONDS <= when <= until + _CLOCK_SECONDS:
                return process
        return None
