"""CPU time and memory of process trees, and what the rest of the machine did meanwhile. Linux only."""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
TICKS = os.sysconf("SC_CLK_TCK")
_PSS = re.compile(r"^Pss:\s+(\d+) kB", re.M)


def tree(pid: int) -> list[int]:
    """A process and its descendants."""
    pids = [pid]
    for parent in pids:
        try:
            tasks = list((PROC / str(parent) / "task").iterdir())
        except FileNotFoundError:
            continue
        for task in tasks:
            try:
                pids += map(int, (task / "children").read_text().split())
            except (FileNotFoundError, ProcessLookupError):
                continue
    return pids


def run_and_wait(pid: int, *, descendants: bool = True) -> tuple[float, float]:
    """Seconds on a CPU, and runnable but waiting for one, in all threads so far. schedstat counts in ns; `stat` counts
    in ticks of 10 ms. What a thread did that has ended since is lost."""
    ran = waited = 0
    for process in tree(pid) if descendants else [pid]:
        try:
            tasks = list((PROC / str(process) / "task").iterdir())
        except FileNotFoundError:
            continue
        for task in tasks:
            try:
                fields = (task / "schedstat").read_text().split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            ran += int(fields[0])
            waited += int(fields[1])
    return ran / 1e9, waited / 1e9


def rss_mib(pid: int) -> float:
    """Resident memory of the tree. What processes share counts once, split among them (PSS): forks share much of it."""
    kib = 0
    for process in tree(pid):
        try:
            rollup = (PROC / str(process) / "smaps_rollup").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        match = _PSS.search(rollup)
        kib += int(match[1]) if match else 0
    return kib / 1024


def machine_seconds() -> float:
    """CPU time that the whole machine has spent on anything, stolen time included."""
    fields = [int(value) for value in (PROC / "stat").read_text().split("\n", 1)[0].split()[1:9]]
    user, nice, system, _idle, _iowait, irq, softirq, steal = fields
    return (user + nice + system + irq + softirq + steal) / TICKS


@dataclass(frozen=True)
class Usage:
    """What happened between start and stop."""

    seconds: float
    cpu: float
    """Of the proxy, in seconds."""
    waited: float
    """CPUs that the proxy could have used in addition: it was runnable, and its core was taken."""
    foreign: float
    """CPUs that others kept busy: neither proxy, mock nor generator."""


class Meter:
    """`proxy` is None where there is none; `harness` are mock and generator."""

    def __init__(self, proxy: int | None, harness: tuple[int, ...]) -> None:
        self.proxy, self.harness = proxy, harness
        self.usage: Usage | None = None

    def _now(self) -> tuple[float, float, float, float, float]:
        ran, waited = run_and_wait(self.proxy) if self.proxy is not None else (0.0, 0.0)
        # The generator's descendants are the mock and all proxies.
        harness = sum(run_and_wait(pid, descendants=False)[0] for pid in self.harness)
        return time.monotonic(), ran, waited, harness, machine_seconds()

    def start(self) -> None:
        self._before = self._now()

    def stop(self) -> Usage:
        seconds, cpu, waited, harness, machine = (b - a for a, b in zip(self._before, self._now(), strict=True))
        # Ticks of 10 ms against ns: a short window can come out a little below zero.
        self.usage = Usage(seconds, cpu, waited / seconds, max(0.0, (machine - cpu - harness) / seconds))
        return self.usage
