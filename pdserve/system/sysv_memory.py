"""SysV shared memory of this IPC namespace: what there is, who made it, and its removal.

Semaphores and message queues are not here: the kernel does not record who made one.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import NamedTuple

_TABLE = Path("/proc/sysvipc/shm")
_IPC_RMID = 0


class SysvSegment(NamedTuple):
    """A line of /proc/sysvipc/shm (proc_sysvipc(5), shmctl(2))."""

    id: int
    creator: int
    """The PID that made it, as our PID namespace counts; 0: from outside. It may be another process's by now."""
    uid: int
    attached: int
    """How many times it is attached now, over all processes."""
    created: int
    """Wall-clock second in which it was made, or its owner last changed its permissions."""


def segments() -> list[SysvSegment]:
    """All that exist; none on a kernel without SysV shared memory."""
    try:
        header, *lines = _TABLE.read_text().splitlines()
    except (OSError, ValueError):
        return []
    names = header.split()
    existing = []
    for line in lines:
        of = dict(zip(names, line.split(), strict=False))
        existing.append(
            SysvSegment(int(of["shmid"]), int(of["cpid"]), int(of["uid"]), int(of["nattch"]), int(of["ctime"]))
        )
    return existing


def remove(segment: SysvSegment) -> bool:
    """Takes it away, for those who have it attached once they are done with it. False: it was gone, or is not ours."""
    code: int = ctypes.CDLL(None).shmctl(segment.id, _IPC_RMID, None)
    return code == 0
