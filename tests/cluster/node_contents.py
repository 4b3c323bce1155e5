"""What still runs or lies on a node, seen from outside of it."""

from __future__ import annotations

import os
from pathlib import Path

from pdserve.system import procfs

_DAEMONS = ("slurmctld", "slurmd", "sshd")
_OF_DOCKER = ("dockerd", "containerd")


def node_processes(init: int) -> list[tuple[int, list[str]]]:
    """(PID outside, argv) of all processes in the node's PID namespace, and in those of containers below it, but its
    first one and its daemons."""
    space = _namespace(init)
    pids = {int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()}
    inside = {pid for pid in pids if _namespace(pid) == space}
    processes = []
    for pid in procfs.family(inside) - {init}:
        argv = _argv(pid)
        if argv and not _is_daemon(pid, init, argv):
            processes.append((pid, argv))
    return sorted(processes)


def node_segments(init: int) -> list[str]:
    """Names in the node's /dev/shm, without semaphores: multiprocessing unlinks theirs as soon as they are open."""
    shm = Path(f"/proc/{init}/root/dev/shm")
    return sorted(path.name for path in shm.iterdir() if not path.name.startswith("sem."))


def _is_daemon(pid: int, init: int, argv: list[str]) -> bool:
    """Direct children of the first process, of which sshd's listener gives itself a title as its sessions do, and the
    helper that slurmctld forks."""
    if argv[0] == "slurmctld: slurmscriptd" or argv[0].rpartition("/")[2] in _OF_DOCKER:
        return True
    if _parent(pid) != init:
        return False
    return argv[0].rpartition("/")[2] in _DAEMONS or "[listener]" in argv[0]


def _namespace(pid: int) -> str | None:
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")  # noqa: PTH115  (pid:[n] is no path)
    except OSError:
        return None


def _parent(pid: int) -> int | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return int(stat[stat.rindex(")") + 2 :].split()[1])


def _argv(pid: int) -> list[str]:
    """Empty for a process that has ended."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return []
    if procfs.identify(pid) is None:
        return []
    return [word.decode(errors="replace") for word in words if word]
