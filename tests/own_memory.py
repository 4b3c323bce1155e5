"""Shared memory of the tests of this process alone: whatever else runs on the machine makes and leaves some too.

Ours: no plugin of pytest knows of shared memory.
"""

from __future__ import annotations

import os
from pathlib import Path

from pdserve.system import procfs, sysv_memory
from tests.cluster import kernel

PREFIX = f"pdserve-test-{os.getpid()}-"
"""Of the names that tests choose."""
_NEW_IPC = 0x08000000
_separate = False


def separate() -> None:
    """Gives this process, and those that it starts from now on, a /dev/shm and SysV segments of their own. Where that
    is not allowed (no CAP_SYS_ADMIN) the tests share them, and know their own by name."""
    global _separate
    os.environ["PDSERVE_TEST_MEMORY"] = PREFIX
    room = os.statvfs(procfs.SHM)
    try:
        kernel.unshare(kernel.NEW_MOUNTS | _NEW_IPC)
    except PermissionError:
        return
    kernel.mount("none", Path("/"), flags=kernel.RECURSIVE | kernel.SLAVE)
    size = f"mode=1777,size={room.f_blocks * room.f_frsize}"
    kernel.mount("tmpfs", procfs.SHM, "tmpfs", options=size)
    _separate = True


def segments() -> set[str]:
    """Those that there are now and that a process of ours has made, as far as that can be known.

    Without semaphores: multiprocessing unlinks their names as soon as they are open.
    """
    names = {path.name for path in procfs.SHM.iterdir() if not path.name.startswith("sem.")}
    if not _separate:
        return {name for name in names if name.startswith(PREFIX)}
    return names | {f"SysV {segment.id}" for segment in sysv_memory.segments()}
