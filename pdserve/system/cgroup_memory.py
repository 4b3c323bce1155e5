"""Whom the kernel has killed for memory, and how much there was: as memory cgroups (v2, else v1) count. Reads only."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from pdserve.printable import size_text
from pdserve.system.cgroup import Cgroup, place

_UNLIMITED = 1 << 60
"""v1 writes "no limit" as a number near 2**63; v2 writes `max`."""


@dataclass(frozen=True)
class Names:
    """Of the files of one version of cgroups."""

    events: str
    limit: str
    peak: str


V2 = Names("memory.events", "memory.max", "memory.peak")
"""MemoryCounts of the cgroup and of all inside it. memory.peak: since Linux 5.19."""
V1 = Names("memory.oom_control", "memory.limit_in_bytes", "memory.max_usage_in_bytes")
"""MemoryCounts of the cgroup alone."""


class MemoryCounts(NamedTuple):
    """Bytes; `limit` is the lowest on the way up; None: none that can be seen, or not known."""

    kills: int
    limit: int | None
    peak: int | None

    def __str__(self) -> str:
        limit = "no limit below the machine's memory" if self.limit is None else f"limit {size_text(self.limit)}"
        return limit if self.peak is None else f"{limit}, peak {size_text(self.peak)}"


def counted(folder: Path, top: Path, names: Names = V2) -> Path | None:
    """The closest cgroup, from `folder` up to `top`, whose kills are counted."""
    return next((level for level in _way_up(folder, top) if _kills(level, names) is not None), None)


def counts(folder: Path, top: Path, names: Names = V2) -> MemoryCounts | None:
    """What is counted in `folder`; None: nothing is."""
    if (kills := _kills(folder, names)) is None:
        return None
    limits = [limit for level in _way_up(folder, top) if (limit := _number(level / names.limit)) is not None]
    return MemoryCounts(kills, min(limits, default=None), _number(folder / names.peak))


class OomWatch:
    """Whether the kernel has killed a process for memory since this was made."""

    def __init__(self, cgroup: Cgroup | None) -> None:
        """`cgroup`: the process's own. Without one, or where it does not count memory, what counts is shared with
        others: then a kill may have been another one's, and is reported as that."""
        self._at = _place(cgroup)
        self._own = cgroup is not None and self._at is not None and self._at[0] == cgroup.path
        before = self._look()
        self._before = 0 if before is None else before.kills

    def _look(self) -> MemoryCounts | None:
        return None if self._at is None else counts(*self._at)

    def explain(self, how: str, code: int | None) -> tuple[str, bool]:
        """How something ended, with the kernel's counts; True: it, or a process of its, was killed for memory.

        `code`: as in protocol.Died.
        """
        now = self._look()
        if now is None or self._at is None or now.kills <= self._before:
            return how, False
        killed = code == -signal.SIGKILL
        if self._own and killed:
            return f"killed by the kernel for memory ({now})", True
        if self._own:
            return f"{how}, and the kernel had killed a process of it for memory ({now})", True
        if killed:
            count = now.kills - self._before
            return f"{how}; meanwhile the kernel killed {count} for memory in {self._at[0]} ({now})", False
        return how, False


def _place(cgroup: Cgroup | None) -> tuple[Path, Path, Names] | None:
    for names, controller in ((V2, ""), (V1, "memory")):
        try:
            folder, top = place(controller)
        except OSError:
            continue
        if cgroup is not None and names is V2:
            folder = cgroup.path
        if (counted_in := counted(folder, top, names)) is not None:
            return counted_in, top, names
    return None


def _way_up(folder: Path, top: Path) -> list[Path]:
    return [level for level in (folder, *folder.parents) if level.is_relative_to(top)]


def _kills(folder: Path, names: Names) -> int | None:
    try:
        lines = (folder / names.events).read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), None)


def _number(file: Path) -> int | None:
    try:
        number = int(file.read_text())
    except (OSError, ValueError):
        return None
    return number if number < _UNLIMITED else None
