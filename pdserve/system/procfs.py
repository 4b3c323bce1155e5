"""Processes as Linux's /proc shows them: identity, trees, listening sockets, shared memory. Reads only."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict, Field

_PROC = Path("/proc")
_STAT_STATE, _STAT_PPID, _STAT_SESSION, _STAT_UTIME, _STAT_STIME, _STAT_START = 0, 1, 3, 11, 12, 19
_TCP_LISTEN = "0A"
SHM = Path("/dev/shm")  # noqa: S108  (POSIX shared memory lives there; nothing is created here)


class ProcessId(BaseModel):
    """A process that cannot be mistaken for a later one with the same PID: PID + start time in clock ticks."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    pid: int = Field(ge=1)
    """Never 0: that is the session of the kernel's own threads and of PID 1, and to signal it reaches a whole group."""
    start_ticks: int = Field(ge=0)

    def alive(self) -> bool:
        """Return True while exactly this process runs. A zombie is dead."""
        stat = _stat(self.pid)
        return stat is not None and int(stat[_STAT_START]) == self.start_ticks and not _has_ended(self.pid, stat)


class Place(BaseModel):
    """The place where a PID means what was recorded: one PID namespace, of one boot of a machine."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    boot: str
    pids: int
    """Inode of the PID namespace."""


def place() -> Place | None:
    """Return the place of this process; None where /proc does not show it."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return Place(boot=boot, pids=Path("/proc/self/ns/pid").stat().st_ino)
    except OSError:
        return None


def identities(pids: Iterable[int]) -> list[ProcessId]:
    """Return the identities of the PIDs that still exist."""
    return [identity for pid in pids if (identity := identify(pid)) is not None]


def identify(pid: int) -> ProcessId | None:
    """Return the identity of a PID; None when there is no such process."""
    stat = _stat(pid)
    return None if stat is None else ProcessId(pid=pid, start_ticks=int(stat[_STAT_START]))


def lines_of(file: Path) -> list[str]:
    """Return the lines of a file of /proc. It holds names that any user may choose (files, mount points, threads):
    bytes of any kind. Raises OSError."""
    return [line for line in file.read_bytes().decode(errors="surrogateescape").split("\n") if line]


def _stat(pid: int) -> list[str] | None:
    """Return the fields of /proc/PID/stat from `state` on; the command name may itself hold spaces and parentheses."""
    try:
        # A scan reads one of these for each process of the machine, and a Path costs more than the read.
        with open(f"{_PROC}/{pid}/stat", encoding="utf-8", errors="replace") as file:  # noqa: PTH123
            text = file.read()
    except OSError:
        return None
    return text[text.rindex(")") + 2 :].split()


def _has_ended(pid: int, stat: list[str]) -> bool:
    """Tell whether a process has ended. One whose first thread has ended is a zombie to look at while others of its
    threads live."""
    if stat[_STAT_STATE] != "Z":
        return stat[_STAT_STATE] == "X"
    others = (_stat(thread) for thread in threads([pid]) if thread != pid)
    return all(other is None or other[_STAT_STATE] in "ZX" for other in others)


def _pids() -> Iterator[int]:
    names = os.listdir(_PROC)  # noqa: PTH208  (names are enough)
    return (int(name) for name in names if name.isdigit())


def is_stopped(process: ProcessId) -> bool:
    """Return True for a process held by SIGSTOP: alive for the kernel, useless for every other process."""
    stat = _stat(process.pid)
    return stat is not None and stat[_STAT_STATE] in "Tt" and int(stat[_STAT_START]) == process.start_ticks


def cpu_ticks(pid: int) -> int | None:
    """Return the CPU time that a process has used, in clock ticks; None when there is no such process."""
    stat = _stat(pid)
    return None if stat is None else int(stat[_STAT_UTIME]) + int(stat[_STAT_STIME])


class Relations(NamedTuple):
    """The relations of one live process to others. Zombies have none."""

    parent: int
    session: int
    start_ticks: int


def relations() -> dict[int, Relations]:
    """Return the relations of every live process, in one reading."""
    processes = {}
    for pid in _pids():
        stat = _stat(pid)
        if stat is not None and not _has_ended(pid, stat):
            processes[pid] = Relations(*(int(stat[field]) for field in (_STAT_PPID, _STAT_SESSION, _STAT_START)))
    return processes


def children() -> set[int]:
    """Return the children of this process, with those that have ended and were not waited for. None where the kernel
    does not list them."""
    try:
        tasks = [(task / "children").read_bytes() for task in (_PROC / "self/task").iterdir()]
    except OSError:
        return set()
    return {int(pid) for task in tasks for pid in task.split()}


def family(
    roots: Iterable[int],
    *,
    within: int | None = None,
    ours: Callable[[int], bool] | None = None,
    seen: dict[int, Relations] | None = None,
) -> set[int]:
    """Return the live PIDs that belong to the roots: descendants, members of a session that a root leads, and, with
    `ours`, those descendants of `within` for which it is true: a subreaper (`process.adopt_orphans`), from which
    nothing that it has started gets away. `seen`: a reading that was taken already."""
    roots = set(roots)
    seen = relations() if seen is None else seen
    members = with_descendants(
        {pid for pid, relation in seen.items() if pid in roots or relation.session in roots}, seen
    )
    if ours is not None and within is not None:
        others = with_descendants({within}, seen) - {within} - members
        members = with_descendants(members | set(filter(ours, others)), seen)
    return members


def ancestry(pid: int, seen: Mapping[int, Relations]) -> set[int]:
    """Return a process and all above it, up to PID 1."""
    line = {1}
    while pid not in line and pid in seen:
        line.add(pid)
        pid = seen[pid].parent
    return line


def with_descendants(members: set[int], seen: Mapping[int, Relations]) -> set[int]:
    """Return these processes with all their descendants."""
    members = set(members)
    grew = True
    while grew:
        more = {pid for pid, relation in seen.items() if relation.parent in members and pid not in members}
        members |= more
        grew = bool(more)
    return members


def in_session(number: int) -> set[int]:
    """Return the live PIDs of the session of that number, whether or not its leader lives."""
    return {pid for pid, relation in relations().items() if relation.session == number}


def started_at(process: ProcessId) -> float:
    """Return when a process was started, in wall-clock seconds, to about a second: the kernel has the time of the boot
    in whole seconds."""
    lines = lines_of(_PROC / "stat")
    booted = next(int(line.split()[1]) for line in lines if line.startswith("btime "))
    return booted + process.start_ticks / os.sysconf("SC_CLK_TCK")


def descendants(root: int) -> set[int]:
    """Return the live descendants of a PID, without itself."""
    return family({root}) - {root}


def threads(pids: Iterable[int]) -> Iterator[int]:
    """Yield the thread IDs of those that still exist, their first threads (the PIDs) among them."""
    for pid in pids:
        try:
            names = [task.name for task in (_PROC / str(pid) / "task").iterdir()]
        except OSError:
            continue
        yield from map(int, names)


def environment(pid: int) -> list[bytes]:
    """Return each `NAME=value` of a process; empty for a zombie, and for one that we may not look into."""
    try:
        return (_PROC / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:
        return []


def environment_values(name: str) -> dict[int, bytes]:
    """Return what a variable is in the environments of all live processes that we may look into, by PID."""
    prefix = f"{name}=".encode()
    every = ((pid, variable) for pid in _pids() for variable in environment(pid) if variable.startswith(prefix))
    return {pid: variable.removeprefix(prefix) for pid, variable in every}


def owner(pid: int) -> int | None:
    """Return the effective uid of a process; None when it is gone, or hidden."""
    try:
        lines = lines_of(_PROC / str(pid) / "status")
    except OSError:
        return None
    return next((int(line.split()[2]) for line in lines if line.startswith("Uid:")), None)


def lock_holder(file: os.stat_result) -> int | None:
    """Return the PID that holds an flock on a file. None: no process here does, or one that cannot be seen from this
    PID namespace."""
    place = f"{os.major(file.st_dev):02x}:{os.minor(file.st_dev):02x}:{file.st_ino}"
    try:
        lines = lines_of(_PROC / "locks")
    except OSError:
        return None
    for line in lines:
        kind, *fields = line.split()[1:]
        if kind == "FLOCK" and fields[3] == place and fields[2].isdigit():
            return int(fields[2]) or None
    return None


def command(pid: int) -> str:
    """Return the command line as one line (vLLM titles its processes: `VLLM::EngineCore`); empty when gone."""
    try:
        return (_PROC / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def process_title(pid: int) -> str:
    """Return what a process calls itself: its thread name (15 characters), or the start of a rewritten command line
    that begins with it."""
    try:
        name = (_PROC / str(pid) / "comm").read_bytes().decode(errors="replace").strip()
    except OSError:
        return ""
    words = command(pid).split()
    return words[0] if words and words[0].startswith(name) else name


def listeners(port: int) -> set[str]:
    """Return the socket inodes that listen on a TCP port, any address, both families."""
    inodes: set[str] = set()
    for table in ("tcp", "tcp6"):
        try:
            lines = lines_of(_PROC / "net" / table)[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if fields[3] == _TCP_LISTEN and int(fields[1].rpartition(":")[2], 16) == port:
                inodes.add(fields[9])
    return inodes


def owners(inodes: set[str], pids: Iterable[int]) -> set[int]:
    """Return those of the PIDs that hold one of the sockets open."""
    wanted = {f"socket:[{inode}]" for inode in inodes}
    return {pid for pid in pids if wanted & set(_open_files(pid))}


def listening_ports(pids: Iterable[int], *, at: str | None = None) -> dict[int, int]:
    """Return the TCP ports on which these processes listen -> PID. How ports that cannot be pinned are read after
    start. `at`: only those that are open at this IPv4 address."""
    open_at = None if at is None else _kernel_address(at)
    accepted = {"0" * 8, "0" * 32, open_at}
    by_inode: dict[str, int] = {}
    for table in ("tcp", "tcp6"):
        try:
            lines = lines_of(_PROC / "net" / table)[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            address, _, port = fields[1].rpartition(":")
            if fields[3] == _TCP_LISTEN and (open_at is None or address in accepted):
                by_inode[f"socket:[{fields[9]}]"] = int(port, 16)
    return {by_inode[link]: pid for pid in pids for link in _open_files(pid) if link in by_inode}


def _kernel_address(address: str) -> str | None:
    """Return an IPv4 address as /proc/net/tcp has it; None of another text."""
    try:
        return f"{int.from_bytes(socket.inet_pton(socket.AF_INET, address), sys.byteorder):08X}"
    except OSError:
        return None


def listener_owner(port: int) -> str | None:
    """Return `PID command` of the listener on a port; None without one, `another user's process` when hidden."""
    inodes = listeners(port)
    if not inodes:
        return None
    for pid in owners(inodes, _pids()):
        return f"PID {pid} ({command(pid)[:120]})"
    return "another user's process"


def _open_files(pid: int) -> Iterator[str]:
    """Yield where the descriptors of a process lead."""
    return (link for _, link in _descriptors(pid))


def _descriptors(pid: int) -> Iterator[tuple[Path, str]]:
    """Yield each descriptor of a process, and where it leads."""
    directory = _PROC / str(pid) / "fd"
    try:
        entries = os.listdir(directory)  # noqa: PTH208
    except OSError:
        return
    for entry in entries:
        with contextlib.suppress(OSError):
            yield directory / entry, os.readlink(directory / entry)  # noqa: PTH115  (socket:[n] is no path)


def shared_memory(pids: Iterable[int]) -> set[int]:
    """Return the inodes of the files of /dev/shm that these processes have mapped, or open for reading and writing as
    one that is about to be mapped is. A path proves nothing: a process may have a /dev/shm of its own."""
    return _shared_memory(pids, access=0o600)


def shared_memory_in_use() -> set[int]:
    """Return the inodes of the files of /dev/shm that any process which we may look into has mapped, or open in
    whatever way."""
    return _shared_memory(_pids(), access=0)


def _shared_memory(pids: Iterable[int], *, access: int) -> set[int]:
    memory = SHM.stat().st_dev
    device = f"{os.major(memory):02x}:{os.minor(memory):02x}"
    inodes: set[int] = set()
    for pid in pids:
        for descriptor, link in _descriptors(pid):
            if link.startswith(f"{SHM}/"):
                with contextlib.suppress(OSError):
                    file = descriptor.stat()
                    # The mode of such a link is that of the descriptor (proc_pid_fd(5)).
                    if file.st_dev == memory and descriptor.lstat().st_mode & access == access:
                        inodes.add(file.st_ino)
        try:
            lines = lines_of(_PROC / str(pid) / "maps")
        except OSError:
            continue
        for line in lines:
            _, _, _, of, inode, *_ = line.split(maxsplit=5)
            if of == device:
                inodes.add(int(inode))
    return inodes
