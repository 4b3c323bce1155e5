"""A number that the kernel hands down from a process to all that it starts, and that is copied with no environment.

RLIMIT_RTTIME (microseconds of CPU for a thread of real-time priority) is unlimited by default. Fork and exec keep both
of its values, whatever becomes of parent, session and environment; the hard one can be lowered but not raised, and
/proc/PID/limits shows both to all users (setrlimit(2), proc_pid_limits(5)). A value above 2^62, which is 146,000 years,
limits nothing, so it can be a number: the hard one of a run's guard and of all below it, the soft one of one process
and of all below it. There are none where a site has set the limit low, and where the kernel does not show it.
"""

from __future__ import annotations

import contextlib
import os
import resource
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from pdserve.system import procfs

_RLIMIT_RTTIME = 15
"""asm-generic/resource.h; Python's module has no name for it. Alpha, MIPS and SPARC, which differ, run no engine."""
_LEAST = 1 << 62
_UNLIMITED = (1 << 63) - 1
"""Lower than the kernel's own infinity, and as good."""
_LINE = b"Max realtime timeout"


class InheritedNumbers(NamedTuple):
    """Of a live process; 0: unlimited, or lower than any number of ours."""

    birth: int
    line: int


def begin() -> int | None:
    """Gives this process, and all that it starts from now on, a number of their own. None where there are none."""
    number = _drawn()
    return number if number is not None and _set(number, number) else None


@contextlib.contextmanager
def born_here() -> Iterator[int | None]:
    """What is started inside has the number, with all that it starts; this process has it meanwhile. None where there
    are none. For one thread at a time."""
    number = _drawn()
    if number is None:
        yield None
        return
    soft, hard = resource.getrlimit(_RLIMIT_RTTIME)
    shown = _set(number, hard)
    try:
        yield number if shown else None
    finally:
        resource.setrlimit(_RLIMIT_RTTIME, (soft, hard))


def _drawn() -> int | None:
    """Below the hard limit, which may be the number of a run inside which this one is started."""
    _, hard = resource.getrlimit(_RLIMIT_RTTIME)
    limit = _UNLIMITED if hard == resource.RLIM_INFINITY else hard
    return _LEAST + 1 + secrets.randbelow(limit - _LEAST - 1) if limit > _LEAST + 1 else None


def _set(soft: int, hard: int) -> bool:
    """Whether all can see it now: kernels that only look like Linux need not show it."""
    resource.setrlimit(_RLIMIT_RTTIME, (soft, hard))
    birth, line = numbers(os.getpid())
    return birth == soft and line in (hard, 0)


def numbers(pid: int) -> InheritedNumbers:
    """Zeros also for a process that is gone."""
    try:
        lines = Path(f"/proc/{pid}/limits").read_bytes().splitlines()
    except OSError:
        return InheritedNumbers(0, 0)
    values = next((line.removeprefix(_LINE).split()[:2] for line in lines if line.startswith(_LINE)), [b"", b""])
    return InheritedNumbers(*(int(value) if value.isdigit() and int(value) > _LEAST else 0 for value in values))


def descendants(line: int) -> set[int]:
    """Live PIDs with the number of `begin`, the process that called it among them."""
    return {pid for pid in procfs.relations() if numbers(pid).line == line}
