"""Which CPUs the processes of an engine may use, and that they keep to them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress

from pdserve.system import procfs


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


def bring_back(pids: Iterable[int], cpus: set[int]) -> None:
    """Threads of these processes that may run on other CPUs may now run on all of `cpus`, and on no other. Those
    that have chosen among `cpus`, as OpenMP's do, keep what they have chosen."""
    for thread in procfs.threads(pids):
        # One that has ended, or is not ours to move: that costs speed, not answers.
        with suppress(OSError):
            if not os.sched_getaffinity(thread) <= cpus:
                os.sched_setaffinity(thread, cpus)
