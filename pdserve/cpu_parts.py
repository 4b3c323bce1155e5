"""Which CPUs the processes of an engine may use, and that they keep to them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path


def share_of_cpus(cpus: Iterable[int], share: tuple[int, int] | None) -> set[int]:
    """The i-th of n equal parts of these CPUs, all of them without a share. With more parts than CPUs several parts
    are the same CPU."""
    every = sorted(cpus)
    if share is None:
        return set(every)
    part, parts = share
    if parts >= len(every):
        return {every[part % len(every)]}
    return set(every[part * len(every) // parts : (part + 1) * len(every) // parts])


def bring_back(pids: Iterable[int], cpus: set[int]) -> int:
    """Threads of these processes that may run elsewhere may then run on all of `cpus`, and nowhere else; how many there
    were. Those that have chosen among `cpus`, as OpenMP's do, keep what they have chosen."""
    moved = 0
    for thread in _threads(pids):
        try:
            if not os.sched_getaffinity(thread) <= cpus:
                os.sched_setaffinity(thread, cpus)
                moved += 1
        except OSError:
            # It has ended, or is not ours to move: that costs speed, not answers.
            continue
    return moved


def _threads(pids: Iterable[int]) -> Iterator[int]:
    for pid in pids:
        try:
            names = [task.name for task in Path(f"/proc/{pid}/task").iterdir()]
        except OSError:
            continue
        yield from map(int, names)
