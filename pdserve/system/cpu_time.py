"""How much CPU time processes have used, and how long a thread has waited for a CPU. Reads /proc only."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

_PROC = Path("/proc")
_USER, _SYSTEM = 11, 12
"""Fields of /proc/PID/stat from `state` on, which follows the name in parentheses."""
_NANOSECONDS = 1e9


def used_seconds(pids: Iterable[int]) -> float:
    """User and system time of all threads of those that still exist."""
    ticks = 0
    for pid in pids:
        try:
            text = (_PROC / str(pid) / "stat").read_text(errors="replace")
        except OSError:
            continue
        fields = text[text.rindex(")") + 2 :].split()
        ticks += int(fields[_USER]) + int(fields[_SYSTEM])
    return ticks / os.sysconf("SC_CLK_TCK")


def wanted_seconds(pid: int) -> float | None:
    """How long the first thread of a process has run or waited for a CPU. None: it is gone, or the kernel does not
    count it (CONFIG_SCHED_INFO)."""
    try:
        ran, waited, slices = (_PROC / str(pid) / "schedstat").read_text().split()
    except (OSError, ValueError):
        return None
    return (int(ran) + int(waited)) / _NANOSECONDS if int(slices) else None
