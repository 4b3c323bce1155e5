"""The ledger of shared memory that our processes made or used, so that a killed engine leaves nothing behind.

A SIGKILLed engine leaves `psm_*` (Python, vLLM), `torch_PID_*` and `lmcache_kv_PID_N` (LMCache leaves the latter after
SIGTERM too) in /dev/shm, and whatever its libraries made as SysV segments. The kernel does not record whose they are
once no process has them mapped, so the agent records them while their owners live. One is ours

- if one of ours has it mapped or open at a look, which is taken as soon as a name appears, or
- if it shows who made it (SysV: the kernel's record of its creator; POSIX: libraries that put the PID into the name),
  and that was the PID of one of ours when it was made (`lives`). A PID in a name counts only where all have the same
  PIDs: containers may share /dev/shm and number their processes each for itself.

It is removed only if besides that it is ours by user, it did not exist before the agent, no living process has it
mapped, open or attached, and who is known to have made it is dead. A POSIX segment is a plain file directly in
/dev/shm: a model, a cache or a virtual environment in a folder there is not.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import stat
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from pdserve.atomic_write import replace_text
from pdserve.system import procfs
from pdserve.system.procfs import ProcessId

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
    """Return all SysV segments that exist; none on a kernel without SysV shared memory."""
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
    """Remove a segment; those who have it attached lose it once they are done with it. False: it was gone, or is not
    ours."""
    code: int = ctypes.CDLL(None).shmctl(segment.id, _IPC_RMID, None)
    return code == 0


_CLOCK_SECONDS = 2.0
"""By which two accounts of when something happened may differ."""
_REMEMBERED_SECONDS = 60.0
"""How long one that has ended is remembered: by then what it has made was looked at many times."""

Kept = list[tuple[int, int, float, float | None]]
"""As JSON: PID, start in clock ticks, wall-clock seconds of its beginning and of its end."""


@dataclass
class _Lifetime:
    began: float
    ended: float | None = None
    """By when it had, at the latest; None: it has not been missed yet."""
    forgotten: float | None = None
    """Monotonic seconds."""


class Lives:
    """The lives of the processes that were seen at a look; one that came and went between two looks is not
    among them."""

    def __init__(self, kept: Kept, until: float) -> None:
        """Go on from what was kept. `kept`: by an earlier look, and no longer than `until` (wall-clock seconds)."""
        self._lives = {
            ProcessId(pid=pid, start_ticks=ticks): _Lifetime(began, ended) for pid, ticks, began, ended in kept
        }
        for process, life in self._lives.items():
            if life.ended is None and not process.alive():
                life.ended = until

    def kept(self) -> Kept:
        """Return all that is remembered."""
        return [(process.pid, process.start_ticks, life.began, life.ended) for process, life in self._lives.items()]

    def see(self, pids: Iterable[int]) -> bool:
        """Note that these processes are ours and live now. True: that changes what is remembered."""
        clock, known = time.monotonic(), len(self._lives)
        changed = False
        for process, life in list(self._lives.items()):
            if life.ended is None and not process.alive():
                life.ended, changed = time.time(), True
            if life.ended is not None and life.forgotten is None:
                life.forgotten = clock + _REMEMBERED_SECONDS
            elif life.forgotten is not None and clock > life.forgotten:
                del self._lives[process]
                known -= 1
        for process in procfs.identities(pids):
            if process not in self._lives:
                self._lives[process] = _Lifetime(procfs.started_at(process))
        return changed or len(self._lives) != known

    def of(self, pid: int, when: float) -> ProcessId | None:
        """Return who of ours had this PID at that wall-clock time; None: none."""
        for process, life in self._lives.items():
            until = time.time() if life.ended is None else life.ended
            if process.pid == pid and life.began - _CLOCK_SECONDS <= when <= until + _CLOCK_SECONDS:
                return process
        return None


_NAMED_AFTER_ITS_MAKER = re.compile(r"(?:torch|lmcache_kv)_([0-9]+)_")
"""torch 2.13 (at::NewProcessWideShmHandle), lmcache 0.5.6 (platform/devices/cpu/shm.py)."""
_SYSV = "sysv/"
"""Before the number of a SysV segment: no name in /dev/shm has a slash."""


class _Segment(NamedTuple):
    """Is a segment that exists and may be ours."""

    name: str
    mark: int
    """Tells it from an earlier or later one of that name. POSIX: its inode."""
    maker: int | None
    made_at: float
    sysv: SysvSegment | None = None

    @property
    def key(self) -> str | int:
        """Return what stays the same when the segment is renamed or changed."""
        return self.mark if self.sysv is None else self.name

    def among(self, inodes: Container[int]) -> bool:
        """Tell whether the segment is one of these files of /dev/shm."""
        return self.sysv is None and self.mark in inodes


class ShmLedger:
    """Segments of ours, kept in a file so that the guard, or a later `down`, can finish the work of a killed agent."""

    def __init__(self, file: Path, *, strangers: Mapping[str, int] | None = None, until: float | None = None) -> None:
        """Go on from the file, if it can be read. `strangers`: what `segment_marks` returned before the first process
        was started; never ours. None: as recorded; with no record nothing is ours. `until`: wall-clock seconds when who
        wrote the file was last known to live; None: when it wrote it."""
        self._file = file
        names: dict[str, int] = {}
        makers: dict[str, tuple[int, int]] = {}
        foreign: set[str | int] = set()
        try:
            kept = json.loads(file.read_text(encoding="utf-8"))
            names, makers = dict(kept["names"]), dict(kept["makers"])
            foreign = set(kept["foreign"])
            self._lives = Lives(kept["lives"], kept["at"] if until is None else until)
            self._strangers: Mapping[str, int] = kept["strangers"]
        except (OSError, ValueError, KeyError, TypeError):  # none, torn, or of another version
            self._lives = Lives([], time.time())
            self._strangers = segment_marks()
        if strangers is not None:
            self._strangers = strangers
        self._names = names
        self._makers = {name: ProcessId(pid=pid, start_ticks=ticks) for name, (pid, ticks) in makers.items()}
        self._others: set[str] = set()
        self._foreign = foreign
        """Keys of segments that show their maker and were not ours at the first look: the maker's PID may be one of
        ours by now, and the time that a segment shows is that of its last change."""

    def unknown(self) -> bool:
        """Tell whether there may be a segment of ours that is not recorded. This is cheap: no process is looked at."""
        return any(
            segment.name not in self._names and segment.name not in self._others for segment in self._candidates()
        )

    def see(self, pids: Iterable[int]) -> None:
        """Note that these processes are ours: what they make from now on is known by their PID, also when they are
        gone."""
        if self._lives.see(pids):
            self.save()

    def record(self, pids: Iterable[int]) -> None:
        """Add what these processes use now, and what all processes that were ever seen have made."""
        pids = set(pids)
        changed = self._lives.see(pids)
        used = procfs.shared_memory(pids)
        for segment in self._candidates():
            maker = None if segment.maker is None else self._lives.of(segment.maker, segment.made_at)
            named = (
                maker is not None
                and segment.key not in self._foreign
                and (segment.sysv is not None or procfs.in_first_pid_namespace())
            )
            if not named and not segment.among(used):
                continue
            if self._names.get(segment.name) != segment.mark or self._makers.get(segment.name) != maker:
                self._names[segment.name] = segment.mark
                self._makers.pop(segment.name, None)
                if maker is not None:
                    self._makers[segment.name] = maker
                changed = True
        if changed:
            self.save()

    def record_of_all(self, ours: Callable[[], set[int]]) -> None:
        """Record as `record` does, where `ours` finds all that live of ours: what another one has made before is not
        looked at again."""
        candidates = list(self._candidates())
        self.record(ours())
        self._others = {segment.name for segment in candidates if segment.sysv is not None} - self._names.keys()
        foreign = {
            segment.key for segment in candidates if segment.maker is not None and segment.name not in self._names
        }
        if foreign != self._foreign:
            self._foreign = foreign
            self.save()

    def save(self) -> None:
        """Writes the file. Without it only those who come after a killed agent know less."""
        makers = {name: (maker.pid, maker.start_ticks) for name, maker in self._makers.items()}
        kept = {
            "names": self._names,
            "makers": makers,
            "lives": self._lives.kept(),
            "strangers": dict(self._strangers),
            "foreign": list(self._foreign),
            "at": time.time(),
        }
        with contextlib.suppress(OSError):
            replace_text(self._file, json.dumps(kept))

    def remove_orphans(self) -> list[str]:
        """Removes recorded segments that no process uses any more; returns their names."""
        if not self._names:
            return []
        removed = []
        used = procfs.shared_memory_in_use()
        present = {segment.name: segment for segment in self._candidates()}
        for name, mark in sorted(self._names.items()):
            segment, maker = present.get(name), self._makers.get(name)
            if segment is not None and segment.mark == mark:
                attached = segment.sysv is not None and segment.sysv.attached > 0
                if segment.among(used) or attached or (maker is not None and maker.alive()):
                    continue
                if segment.sysv is None:
                    (procfs.SHM / name).unlink(missing_ok=True)
                else:
                    remove(segment.sysv)
                removed.append(name)
            del self._names[name]
            self._makers.pop(name, None)
        return removed

    def _candidates(self) -> Iterator[_Segment]:
        """Yield the segments of our user that did not exist before, under whatever name."""
        inodes = {mark for name, mark in self._strangers.items() if not name.startswith(_SYSV)}
        return (
            segment
            for segment in _existing_segments(os.getuid())
            if self._strangers.get(segment.name) != segment.mark and not segment.among(inodes)
        )


def segment_marks() -> dict[str, int]:
    """Return, for every segment that there is now, what makes it another one than a later one of the same name."""
    return {segment.name: segment.mark for segment in _existing_segments()}


def _existing_segments(uid: int | None = None) -> Iterator[_Segment]:
    """Yield POSIX and SysV segments, of this user or of all."""
    # Others may have left thousands, and a Path costs more than the look at the file.
    with os.scandir(procfs.SHM) as entries:
        for entry in entries:
            try:
                info = entry.stat(follow_symlinks=False)
            except OSError:
                continue
            if stat.S_ISREG(info.st_mode) and uid in (None, info.st_uid):
                named = _NAMED_AFTER_ITS_MAKER.match(entry.name)
                yield _Segment(entry.name, info.st_ino, None if named is None else int(named[1]), info.st_ctime)
    for segment in segments():
        if uid in (None, segment.uid):
            yield _Segment(f"{_SYSV}{segment.id}", segment.created, segment.creator, segment.created, segment)
