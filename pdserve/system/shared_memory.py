"""The ledger of shared memory that our processes use, so that a killed engine leaves nothing behind.

A SIGKILLed engine leaves `psm_*` (Python, vLLM), `torch_PID_*` and `lmcache_kv_PID_N` (LMCache leaves the latter after
SIGTERM too) in /dev/shm. The kernel does not record whose they are once no process has them mapped, so the agent
records at each look which processes of ours have them mapped or open.

A recorded segment is removed only if it is ours by user, it did not exist before the agent, no living process has it
mapped or open, and all that were seen with it are dead. A segment is a plain file directly in /dev/shm: a model, a
cache or a virtual environment in a folder there is not.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from pdserve.atomic_write import replace_text
from pdserve.system import procfs
from pdserve.system.procfs import ProcessId


class ShmLedger:
    """Segments of ours, kept in a file so that the guard, or a later `down`, can finish the work of a killed agent."""

    def __init__(self, file: Path, *, strangers: Mapping[str, int] | None = None) -> None:
        """Go on from the file, if it can be read. `strangers`: what `segment_inodes` returned before the first process
        was started; never ours. None: as recorded; with no record nothing is ours."""
        self._file = file
        self._inodes: dict[str, int] = {}
        self._users: dict[str, set[ProcessId]] = {}
        try:
            kept = json.loads(file.read_text(encoding="utf-8"))
            self._strangers: Mapping[str, int] = kept["strangers"]
            for name, inode, users in kept["segments"]:
                self._inodes[name] = inode
                self._users[name] = {ProcessId(pid=pid, start_ticks=ticks) for pid, ticks in users}
        except (OSError, ValueError, KeyError, TypeError):  # none, or torn
            self._strangers = segment_inodes()
        if strangers is not None:
            self._strangers = strangers

    def unknown(self) -> bool:
        """Tell whether there may be a segment of ours that is not recorded. This is cheap: no process is looked at."""
        return any(self._inodes.get(name) != inode for name, inode in self._candidates())

    def record(self, pids: Iterable[int]) -> None:
        """Add what these processes, which are ours, use now."""
        names = {inode: name for name, inode in self._candidates()}
        changed = False
        for process in procfs.identities(pids) if names else ():
            for inode in procfs.shared_memory([process.pid]) & names.keys():
                name = names[inode]
                if self._inodes.get(name) != inode:
                    self._inodes[name], self._users[name] = inode, set()
                if process not in self._users[name]:
                    self._users[name].add(process)
                    changed = True
        if changed:
            self.save()

    def save(self) -> None:
        """Writes the file. Without it only those who come after a killed agent know less."""
        segments = [
            (name, inode, [(user.pid, user.start_ticks) for user in self._users[name]])
            for name, inode in self._inodes.items()
        ]
        with contextlib.suppress(OSError):
            replace_text(self._file, json.dumps({"strangers": dict(self._strangers), "segments": segments}))

    def remove_orphans(self) -> list[str]:
        """Removes recorded segments that no process uses any more; returns their names."""
        if not self._inodes:
            return []
        removed = []
        used = procfs.shared_memory_in_use()
        present = dict(self._candidates())
        for name, inode in sorted(self._inodes.items()):
            if present.get(name) == inode:
                if inode in used or any(user.alive() for user in self._users[name]):
                    continue
                (procfs.SHM / name).unlink(missing_ok=True)
                removed.append(name)
            del self._inodes[name], self._users[name]
        return removed

    def _candidates(self) -> Iterator[tuple[str, int]]:
        """Yield name and inode of each segment of our user that did not exist before, under whatever name."""
        before = set(self._strangers.values())
        return ((name, inode) for name, inode in _segments(os.getuid()) if inode not in before)


def segment_inodes() -> dict[str, int]:
    """Return the inode of each segment that there is now, by its name."""
    return dict(_segments())


def _segments(uid: int | None = None) -> Iterator[tuple[str, int]]:
    """Yield name and inode of the segments of this user, or of all."""
    # Others may have left thousands, and a Path costs more than the look at the file.
    with os.scandir(procfs.SHM) as entries:
        for entry in entries:
            try:
                info = entry.stat(follow_symlinks=False)
            except OSError:
                continue
            if stat.S_ISREG(info.st_mode) and uid in (None, info.st_uid):
                yield entry.name, info.st_ino
