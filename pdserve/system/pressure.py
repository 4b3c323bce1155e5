"""What holds a process back on its host: memory that was swapped out, CPU time that a limit has taken. Reads only."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from pdserve.system import procfs

_PROC = Path("/proc")


@dataclass(frozen=True)
class Pressure:
    """Of a process tree."""

    swapped_bytes: int
    throttled_seconds: float | None
    """CPU time that it was kept from using by cpu.max of its cgroup or of a cgroup above; None: not counted here."""
    periods: int = 0
    throttled_periods: int = 0
    """Of the cgroup's accounting periods, and in how many of them the limit was reached."""
    busiest_share: float | None = None
    """Of a CPU, that the busiest process of the tree used over a while; None: not measured."""


def pressure_of(root: int, top: Path | None, *, proc: Path = _PROC) -> Pressure:
    """Of a living process and its descendants; what has gone meanwhile counts nothing. `top`: the mount of cgroups v2;
    None: there is none."""
    pids = {root, *procfs.descendants(root)} if proc == _PROC else {root}
    throttled = None if top is None else _throttled(_cgroups_of(root, proc, top))
    if throttled is None:
        return Pressure(_swapped(pids, proc), None)
    periods, limited, microseconds = throttled
    return Pressure(_swapped(pids, proc), microseconds / 1e6, periods, limited)


def cpu_seconds(root: int) -> dict[int, float]:
    """CPU time so far of a living process and its descendants, by PID."""
    ticks = os.sysconf("SC_CLK_TCK")
    used = {pid: procfs.cpu_ticks(pid) for pid in (root, *procfs.descendants(root))}
    return {pid: count / ticks for pid, count in used.items() if count is not None}


def busiest(before: dict[int, float], after: dict[int, float], seconds: float) -> float | None:
    """The largest share of a CPU that a process used between two looks; None: none was there in both."""
    shares = [(after[pid] - used) / seconds for pid, used in before.items() if pid in after]
    return max(shares, default=None)


def _swapped(pids: Iterable[int], proc: Path) -> int:
    total = 0
    for pid in pids:
        try:
            lines = procfs.lines_of(proc / str(pid) / "status")
        except OSError:
            continue
        for line in lines:
            name, _, value = line.partition(":")
            words = value.split()
            if name == "VmSwap" and words and words[0].isdecimal():
                total += int(words[0]) << 10
    return total


def _cgroups_of(pid: int, proc: Path, top: Path) -> list[Path]:
    """Its cgroup (v2) and those above it, the closest first."""
    try:
        entries = procfs.lines_of(proc / str(pid) / "cgroup")
    except OSError:
        return []
    for entry in entries:
        if entry.startswith("0::/"):
            folder = top / entry.removeprefix("0::/")
            return [folder, *(above for above in folder.parents if above == top or top in above.parents)]
    return []


def _throttled(folders: Iterable[Path]) -> tuple[int, int, int] | None:
    """Periods, throttled periods and throttled microseconds, where most was taken."""
    counted = [counts for folder in folders if (counts := _cpu_stat(folder)) is not None]
    return max(counted, key=lambda each: each[2], default=None)


def _cpu_stat(folder: Path) -> tuple[int, int, int] | None:
    try:
        lines = procfs.lines_of(folder / "cpu.stat")
    except OSError:
        return None
    values = {name: int(value) for name, _, value in (line.partition(" ") for line in lines) if value.isdecimal()}
    if "throttled_usec" not in values:
        return None
    return values.get("nr_periods", 0), values.get("nr_throttled", 0), values["throttled_usec"]
