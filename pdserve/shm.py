"""The ledger of /dev/shm segments: what our processes mapped, so that a killed engine leaves nothing behind.

A SIGKILLed engine leaves `psm_*` and `lmcache_kv_PID_N` (LMCache leaves the latter after SIGTERM too). Their names
say little of their owner, so the agent records what its processes have mapped while they live. A segment is removed
only if one of ours mapped it, it is a POSIX segment (a plain file directly in /dev/shm: a model, a cache or a virtual
environment that somebody keeps in a folder there is not), it is ours by user, it did not exist before the agent, and
no living process maps it.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path

from pdserve import procfs


class ShmLedger:
    """Segments seen, kept in a file so that the guard, or a later `down`, can finish the work of a killed agent."""

    def __init__(self, file: Path, *, strangers: Mapping[str, int] | None = None) -> None:
        """`strangers`: what `existing` saw before the first process was started; never ours. None: as recorded; with
        no record nothing is ours."""
        self._file = file
        try:
            kept = json.loads(file.read_text())
        except (OSError, ValueError):
            kept = {"strangers": existing(), "names": []}
        self._strangers: Mapping[str, int] = kept["strangers"] if strangers is None else strangers
        self._names: set[str] = set(kept["names"])

    def unknown(self) -> bool:
        """Whether there is a segment that may be of one of ours and is not recorded. Cheap: no process is looked at."""
        return any(self._created_by_us(name) for name in existing().keys() - self._names)

    def record(self, pids: Iterable[int]) -> None:
        """Adds what these processes map now."""
        seen = {name for name in procfs.shared_memory(pids) if self._created_by_us(name)} - self._names
        if seen:
            self._names |= seen
            self.save()

    def save(self) -> None:
        """Writes the file. Without it only those who come after a killed agent know less."""
        temporary = self._file.with_suffix(".tmp")
        with contextlib.suppress(OSError):
            temporary.write_text(json.dumps({"names": sorted(self._names), "strangers": dict(self._strangers)}))
            temporary.rename(self._file)

    def remove_orphans(self) -> list[str]:
        """Unlinks recorded segments that no living process maps; returns their names."""
        if not self._names:
            return []
        removed = []
        for name in sorted(self._names - procfs.shared_memory_in_use()):
            path = procfs.SHM / name
            if path.exists() and self._created_by_us(name):
                path.unlink(missing_ok=True)
                removed.append(name)
            self._names.discard(name)
        return removed

    def _created_by_us(self, name: str) -> bool:
        if "/" in name:
            return False
        try:
            found = (procfs.SHM / name).lstat()
        except OSError:
            return False
        ours = stat.S_ISREG(found.st_mode) and found.st_uid == os.getuid()
        return ours and found.st_ino != self._strangers.get(name)


def existing() -> dict[str, int]:
    """Names in /dev/shm now -> inode: a later segment of the same name is another one."""
    found = {}
    for path in procfs.SHM.iterdir():
        try:
            found[path.name] = path.stat().st_ino
        except OSError:
            continue
    return found
