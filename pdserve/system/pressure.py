"""Measure what holds a process back on its host: memory that was swapped out, CPU time that a limit has taken. Reads
only."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from pdserve.system import procfs

_PROC = Path("/proc")
_CPU = "cpu"
SWAPPED_ENOUGH = 64 << 20
"""Bytes: a little of every process is swapped out on a host with much memory, and never missed."""


@dataclass(frozen=True)
class Pressure:
    """The pressure on a process tree."""

    swapped_bytes: int
    throttled_seconds: float | None
    """CPU time that it was kept from using by cpu.max of its cgroup or of a cgroup above; None: not counted here."""
    periods: int = 0
    throttled_periods: int = 0
    """Of the cgroup's accounting periods, and in how many of them the limit was reached."""
    busiest_share: float | None = None
    """The share of a CPU that the busiest process of the tree used over a while; None: not measured."""
    wanted_share: float | None = None
    """The share of a while in which the busiest process of the tree ran or waited for a CPU; None: not measured."""


def pressure_of(root: int, top: Path | None, v1: Path | None = None, *, proc: Path = _PROC) -> Pressure:
    """Return the pressure on a living process and its descendants; what has gone meanwhile counts nothing. `top`: the
    mount of cgroups v2, `v1`: that of v1's cpu controller; None: there is none."""
    pids = {root, *procfs.descendants(root)} if proc == _PROC else {root}
    folders = [] if top is None else _cgroups_of(root, proc, top)
    folders += [] if v1 is None else _cgroups_of(root, proc, v1, _CPU)
    throttled = _throttling(folders)
    if throttled is None:
        return Pressure(swapped_bytes(pids, proc), None)
    periods, limited, microseconds = throttled
    return Pressure(swapped_bytes(pids, proc), microseconds / 1e6, periods, limited)


def cpu_seconds(root: int) -> dict[int, float]:
    """Return the CPU time so far of a living process and its descendants, by PID."""
    ticks = os.sysconf("SC_CLK_TCK")
    used = {pid: procfs.cpu_ticks(pid) for pid in (root, *procfs.descendants(root))}
    return {pid: count / ticks for pid, count in used.items() if count is not None}


def used_seconds(pids: Iterable[int]) -> float:
    """Return the user and system time of all threads of those that still exist."""
    ticks = (procfs.cpu_ticks(pid) for pid in pids)
    return sum(count for count in ticks if count is not None) / os.sysconf("SC_CLK_TCK")


def wanted_seconds(pids: Iterable[int], *, proc: Path = _PROC) -> dict[int, float]:
    """Return for how long the first thread of each process has run or waited for a CPU (/proc/PID/schedstat).

    A process is left out when it is gone, or where the kernel does not count it (CONFIG_SCHED_INFO).
    """
    wanted: dict[int, float] = {}
    for pid in pids:
        try:
            ran, waited, slices = (proc / str(pid) / "schedstat").read_text().split()
            if int(slices):
                wanted[pid] = (int(ran) + int(waited)) / 1e9
        except (OSError, ValueError):
            continue
    return wanted


def largest_cpu_share(before: dict[int, float], after: dict[int, float], seconds: float) -> float | None:
    """Return the largest share of a CPU that a process used between two looks; None: none was there in both."""
    shares = [(after[pid] - used) / seconds for pid, used in before.items() if pid in after]
    return max(shares, default=None)


def swapped_bytes(pids: Iterable[int], proc: Path = _PROC) -> int:
    """Return the bytes of these processes together in swap; one that has gone has none."""
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


def _cgroups_of(pid: int, proc: Path, top: Path, controller: str = "") -> list[Path]:
    """Return the cgroup of a process and those above it, the closest first. `controller`: of v1; empty: v2."""
    try:
        entries = procfs.lines_of(proc / str(pid) / "cgroup")
    except OSError:
        return []
    for entry in entries:
        _, _, named = entry.partition(":")
        controllers, _, path = named.partition(":")
        if path.startswith("/") and controller in controllers.split(","):
            folder = top / path.removeprefix("/")
            return [folder, *(above for above in folder.parents if above == top or top in above.parents)]
    return []


def _throttling(folders: Iterable[Path]) -> tuple[int, int, int] | None:
    """Return the periods, throttled periods and throttled microseconds, where most was taken."""
    counted = [counts for folder in folders if (counts := _cpu_stat(folder)) is not None]
    return max(counted, key=lambda each: each[2], default=None)


def _cpu_stat(folder: Path) -> tuple[int, int, int] | None:
    try:
        lines = procfs.lines_of(folder / "cpu.stat")
    except OSError:
        return None
    values = {name: int(value) for name, _, value in (line.partition(" ") for line in lines) if value.isdecimal()}
    if "throttled_time" in values:  # v1: nanoseconds
        values["throttled_usec"] = values["throttled_time"] // 1000
    if "throttled_usec" not in values:
        return None
    return values.get("nr_periods", 0), values.get("nr_throttled", 0), values["throttled_usec"]
