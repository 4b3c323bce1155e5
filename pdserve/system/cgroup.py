"""Cgroups (v2) of our own, one for each process that an agent starts, so that nothing that it starts can get away.

A child is born in the cgroup of its parent. A session of its own, a double fork or an empty environment do not lead out
of it, so the kernel's list of its members is whole, and `cgroup.kill` ends all of them at once, frozen ones too.

    <cgroup of the agent>/pdserve-<run id>@<node>-<PID of the guard>/<process>.<life>

They can be made where the agent may write to its own cgroup: as root, in a unit with Delegate=yes, in a container or a
Slurm step whose cgroups are writable. No process but the agent itself is ever moved.

Where memory cgroups (v2, else v1) count, `OomWatch` shows whom the kernel has killed for memory, and how much it had.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict

from pdserve.printable import size_text
from pdserve.system import procfs

SWITCH = "PDSERVE_CGROUPS"
"""Environment variable; `off` where pdserve is started: make none."""
_PROC = Path("/proc/self")
_FROZEN = "frozen 1"
_ESCAPED = re.compile(r"\\([0-7]{3})")


class CgroupId(BaseModel):
    """A cgroup that cannot be mistaken for another one of its path: until the next boot no inode number comes twice."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: str
    device: int
    inode: int
    parent: int
    """Inode of the one in which it is, by which it can be known that it was removed."""


class Cgroup:
    """One cgroup, and those that were made inside it. Each method looks whether it still is the same one."""

    def __init__(self, identity: CgroupId) -> None:
        self.id = identity
        self.path = Path(identity.path)

    @classmethod
    def at(cls, path: Path) -> Cgroup:
        """Return the cgroup that is at a path now. Raises OSError."""
        status = path.lstat()
        parent = path.parent.lstat().st_ino
        return cls(CgroupId(path=str(path), device=status.st_dev, inode=status.st_ino, parent=parent))

    def new(self, name: str) -> Cgroup:
        """Make a cgroup inside this one. Raises OSError."""
        (self.path / name).mkdir()
        return Cgroup.at(self.path / name)

    def exists(self) -> bool:
        """Tell whether the cgroup is still there, and no other one in its place."""
        try:
            with self._open_folder():
                return True
        except OSError:
            return False

    def members(self) -> set[int]:
        """Return the PIDs of all that live in the cgroup, or in one inside it. Those of another PID namespace have no
        number here."""
        pids: set[int] = set()
        if self.exists():
            for folder, _, _ in os.walk(self.path):
                with contextlib.suppress(OSError):
                    pids.update(_pids(Path(folder)))
        return pids - {0}

    def kill(self) -> None:
        """Send KILL to every member at once, also to those that are being forked. Does nothing once it is gone, and
        never ends its caller."""
        if os.getpid() in self.members():
            return
        with contextlib.suppress(OSError), self._open_folder() as folder:
            file = os.open("cgroup.kill", os.O_WRONLY, dir_fd=folder)
            try:
                os.write(file, b"1")
            finally:
                os.close(file)

    def remove(self) -> bool:
        """Remove the cgroup and what was made inside it, as far as no process is there. True once it is gone."""
        if not self.exists():
            return True
        for folder, _, _ in os.walk(self.path, topdown=False):
            try:
                os.rmdir(folder)  # noqa: PTH106  (os.walk gives strings)
            except FileNotFoundError:
                continue
            except OSError:
                return False
        return True

    @contextmanager
    def born_here(self) -> Iterator[None]:
        """Have whatever the block starts born in this cgroup: this process, with all its threads, is there meanwhile.

        Python's subprocess cannot ask for CLONE_INTO_CGROUP (can go when it can), and a child that is moved after its
        birth may have forked before. Raises OSError, also where the cgroup is frozen: so would be who enters it.
        """
        home, _ = place()
        if _FROZEN in (self.path / "cgroup.events").read_text().splitlines():
            thaw = "find out who has frozen it or one above it, and write 0 to cgroup.freeze there"
            raise OSError(errno.EBUSY, f"it is frozen: {thaw}", str(self.path))
        _enter(self.path)
        try:
            yield
        finally:
            _enter(home)

    @contextmanager
    def _open_folder(self) -> Iterator[int]:
        folder = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            status = os.fstat(folder)
            if (status.st_dev, status.st_ino) != (self.id.device, self.id.inode):
                raise FileNotFoundError(errno.ENOENT, "another one has its path", str(self.path))
            yield folder
        finally:
            os.close(folder)


class CgroupOutcome(NamedTuple):
    """A cgroup of ours, or why there is none."""

    cgroup: Cgroup | None
    why_not: str = ""


def prefix(run_id: str) -> str:
    """Return how the name of every cgroup begins that an agent of the run makes."""
    return f"pdserve-{run_id}@"


def make_own_cgroup(name: str, environ: Mapping[str, str]) -> CgroupOutcome:
    """Make a cgroup inside our own, which this process has entered and left: what starts in it can be born there."""
    if environ.get(SWITCH) == "off":
        return CgroupOutcome(None, f"{SWITCH}=off")
    try:
        home, _ = place()
        (home / name).mkdir()
        made = Cgroup.at(home / name)
    except OSError as error:
        return CgroupOutcome(None, _error_text(error))
    try:
        if not (made.path / "cgroup.kill").exists():
            raise FileNotFoundError(errno.ENOENT, "this kernel has no cgroup.kill (Linux 5.14 has)", str(made.path))
        with made.born_here():
            pass
    except OSError as error:
        made.remove()
        return CgroupOutcome(None, _error_text(error))
    # Each process's memory is then counted by itself (`OomWatch`). Below the root the kernel refuses it (EBUSY)
    # where processes are in our own, and those of others are not ours to move.
    for folder in (home, made.path):
        with contextlib.suppress(OSError):
            (folder / "cgroup.subtree_control").write_text("+memory")
    return CgroupOutcome(made)


def find_recorded_cgroup(identity: CgroupId | None, run_id: str) -> Cgroup | None:
    """Return the cgroup of a record, if it is still that one and has the name that an agent of the run gives."""
    if identity is None or not Path(identity.path).name.startswith(prefix(run_id)):
        return None
    cgroup = Cgroup(identity)
    return cgroup if cgroup.exists() else None


def is_known(identity: CgroupId) -> bool:
    """Tell whether it can be seen from here what is in a cgroup: it is there, or it was removed, which the kernel does
    not allow while anything lives in it."""
    if Cgroup(identity).exists():
        return True
    try:
        above = Path(identity.path).parent.lstat()
    except OSError:
        return False
    return (above.st_dev, above.st_ino) == (identity.device, identity.parent)


def place(controller: str = "", proc: Path = _PROC) -> tuple[Path, Path]:
    """Return our own cgroup, and the mount that shows it. `controller`: of cgroup v1, such as `memory`; empty: v2.

    This does not see what a cgroup namespace hides. Raises OSError.
    """
    paths = [line.split(":", 2) for line in procfs.lines_of(proc / "cgroup")]
    ours = [path for _, controllers, path in paths if controller in controllers.split(",")]
    for top, root in _mounts(controller, proc):
        for path in ours:
            below = os.path.relpath(path, root)
            if not below.startswith(".."):
                folder = top / below
                with contextlib.suppress(OSError):
                    if os.getpid() in _pids(folder):
                        return folder, top
    kind = f"cgroup v1 ({controller})" if controller else "cgroup v2"
    raise FileNotFoundError(errno.ENOENT, f"no mount of {kind} shows where this process is", str(proc / "mountinfo"))


def _mounts(controller: str, proc: Path) -> Iterator[tuple[Path, str]]:
    """Yield each mount point, and the cgroup that is mounted there, of v2 or of a v1 controller."""
    for line in procfs.lines_of(proc / "mountinfo"):
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ", 2)
        if kind == ("cgroup" if controller else "cgroup2") and (not controller or controller in options.split(",")):
            root, point = (_ESCAPED.sub(lambda match: chr(int(match[1], 8)), each) for each in before.split()[3:5])
            yield Path(point), root


def _pids(folder: Path) -> list[int]:
    return [int(line) for line in (folder / "cgroup.procs").read_text().split()]


def _enter(folder: Path) -> None:
    with (folder / "cgroup.procs").open("wb", buffering=0) as file:
        file.write(b"0")  # the writer


def _error_text(error: OSError) -> str:
    return f"{error.filename}: {error.strerror}" if error.filename else str(error)


_UNLIMITED = 1 << 60
"""v1 writes "no limit" as a number near 2**63; v2 writes `max`."""


@dataclass(frozen=True)
class FileNames:
    """The names of the files of one version of cgroups."""

    events: str
    limit: str
    peak: str


V2 = FileNames("memory.events", "memory.max", "memory.peak")
"""MemoryCounts of the cgroup and of all inside it. memory.peak: since Linux 5.19."""
V1 = FileNames("memory.oom_control", "memory.limit_in_bytes", "memory.max_usage_in_bytes")
"""MemoryCounts of the cgroup alone."""


class MemoryCounts(NamedTuple):
    """Holds counts of memory, in bytes; `limit` is the lowest on the way up; None: none that can be seen, or not
    known."""

    kills: int
    limit: int | None
    peak: int | None

    def __str__(self) -> str:
        limit = "no limit below the machine's memory" if self.limit is None else f"limit {size_text(self.limit)}"
        return limit if self.peak is None else f"{limit}, peak {size_text(self.peak)}"


def closest_counted_cgroup(folder: Path, top: Path, names: FileNames = V2) -> Path | None:
    """Return the closest cgroup, from `folder` up to `top`, whose kills are counted."""
    return next((level for level in _way_up(folder, top) if _kills(level, names) is not None), None)


def counts(folder: Path, top: Path, names: FileNames = V2) -> MemoryCounts | None:
    """Return what is counted in `folder`; None: nothing is."""
    if (kills := _kills(folder, names)) is None:
        return None
    limits = [limit for level in _way_up(folder, top) if (limit := _number(level / names.limit)) is not None]
    return MemoryCounts(kills, min(limits, default=None), _number(folder / names.peak))


class OomWatch:
    """Tells whether the kernel has killed a process for memory since this was made."""

    def __init__(self, cgroup: Cgroup | None) -> None:
        """Note how many were killed until now. `cgroup`: the process's own. Without one, or where it does not count
        memory, what counts is shared with others: then a kill may have been another one's, and is reported as that."""
        self._at = _counted_place(cgroup)
        self._own = cgroup is not None and self._at is not None and self._at[0] == cgroup.path
        before = self._look()
        self._before = 0 if before is None else before.kills

    def _look(self) -> MemoryCounts | None:
        return None if self._at is None else counts(*self._at)

    def explain(self, how: str, code: int | None) -> tuple[str, bool]:
        """Return how something ended, with the kernel's counts; True: it, or a process of its, was killed for memory.

        `code`: as in protocol.Died.
        """
        now = self._look()
        if now is None or self._at is None or now.kills <= self._before:
            return how, False
        killed = code == -signal.SIGKILL
        if self._own and killed:
            return f"killed by the kernel for memory ({now})", True
        if self._own:
            return f"{how}, and the kernel had killed a process of it for memory ({now})", True
        if killed:
            count = now.kills - self._before
            return f"{how}; meanwhile the kernel killed {count} for memory in {self._at[0]} ({now})", False
        return how, False


def _counted_place(cgroup: Cgroup | None) -> tuple[Path, Path, FileNames] | None:
    for names, controller in ((V2, ""), (V1, "memory")):
        try:
            folder, top = place(controller)
        except OSError:
            continue
        if cgroup is not None and names is V2:
            folder = cgroup.path
        if (counted_in := closest_counted_cgroup(folder, top, names)) is not None:
            return counted_in, top, names
    return None


def _way_up(folder: Path, top: Path) -> list[Path]:
    return [level for level in (folder, *folder.parents) if level.is_relative_to(top)]


def _kills(folder: Path, names: FileNames) -> int | None:
    try:
        lines = (folder / names.events).read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), None)


def _number(file: Path) -> int | None:
    try:
        number = int(file.read_text())
    except (OSError, ValueError):
        return None
    return number if number < _UNLIMITED else None
