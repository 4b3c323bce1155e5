"""Facts of this machine that a plan or a preflight needs. Reads only; a fact that cannot be read is None."""

from __future__ import annotations

import os
import re
import shutil
import socket
from dataclasses import dataclass
from pathlib import Path

from pdserve.plan.node import Node
from pdserve.system.procfs import SHM, Place, lines_of, place

_UNLIMITED = 1 << 60
"""cgroup v1 writes "no limit" as a number near 2**63."""


@dataclass(frozen=True)
class MemoryFacts:
    """Holds the memory of a host, in bytes. `limit_free`: what the cgroup still allows; None when there is no limit or
    it cannot be read."""

    available: int
    shm_free: int
    limit_free: int | None

    @property
    def usable(self) -> int:
        """Return the bytes that a process can still get before the kernel kills one."""
        return self.available if self.limit_free is None else min(self.available, self.limit_free)


def local_node(platform: str) -> Node:
    """Return this machine as a node: loopback address, all devices of the platform."""
    return Node(name=socket.gethostname().partition(".")[0] or "localhost", devices=devices(platform))


def is_here(hostname: str, recorded: Place | None) -> bool:
    """Tell whether PIDs of a recorded place mean the same here. Where no place is recorded, the hostname decides."""
    ours = place()
    return is_named_here(hostname) if recorded is None or ours is None else recorded == ours


def is_named_here(hostname: str) -> bool:
    """Return whether that is this machine's name: what has it may still be another container, or an earlier boot."""
    return hostname == socket.gethostname()


def is_beside(hostname: str, recorded: Place | None) -> bool:
    """Return whether that is another PID namespace under this machine's name: a container, or what is outside of this
    one."""
    ours = place()
    return (
        is_named_here(hostname)
        and recorded is not None
        and ours is not None
        and recorded.boot == ours.boot
        and recorded.pids != ours.pids
    )


def devices(platform: str) -> tuple[int, ...]:
    """Return the device ids that the kernel driver shows. Empty on CPU and where there is no driver."""
    if platform == "cuda":
        return tuple(range(len(_entries(Path("/proc/driver/nvidia/gpus")))))
    if platform == "rocm":
        nodes = _entries(Path("/sys/class/kfd/kfd/topology/nodes"))
        # CPU nodes of the topology have gpu_id 0.
        return tuple(range(sum(1 for node in nodes if _number(node / "gpu_id"))))
    return ()


def memory() -> MemoryFacts:
    """Return what is free now."""
    meminfo = Path("/proc/meminfo").read_text()
    match = re.search(r"^MemAvailable:\s+(\d+) kB", meminfo, re.MULTILINE)
    available = int(match.group(1)) * 1024 if match else os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return MemoryFacts(available=available, shm_free=shutil.disk_usage(SHM).free, limit_free=_cgroup_free())


def _cgroup_free() -> int | None:
    """Return the limit minus use of the closest cgroup that has a limit (v2, then v1)."""
    frees = []
    for line in lines_of(Path("/proc/self/cgroup")):
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, limit_file, use_file = Path("/sys/fs/cgroup"), "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            root = Path("/sys/fs/cgroup/memory")
            limit_file, use_file = "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        folder = root / path.lstrip("/")
        for level in (folder, *folder.parents):
            limit, use = _number(level / limit_file), _number(level / use_file)
            if limit is not None and use is not None and limit < _UNLIMITED:
                frees.append(max(0, limit - use))
            if level == root:
                break
    return min(frees, default=None)


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _number(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None
