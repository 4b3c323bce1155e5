"""The ledger of /dev/shm segments: what our processes mapped, so that a killed engine leaves nothing behind.

A SIGKILLed engine leaves `psm_*` and `lmcache_kv_PID_N` (LMCache leaves the latter after SIGTERM too). Their names
say little of their owner, so the agent records what its processes have mapped while they live. A segment is removed
only if one of ours mapped it, it did not exist before the agent, and no living process maps it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from pdserve import procfs


class ShmLedger:
    """Segments seen, kept in a file so that the guard can finish the work of a killed agent."""

    def __init__(self, file: Path, *, strangers: Mapping[str, int]) -> None:
        """`strangers`: what `existing` saw before the first process was started; never ours."""
        self._file = file
        self._strangers = strangers
        self._names: set[str] = set(json.loads(file.read_text())) if file.exists() else set()

    def record(self, pids: Iterable[int]) -> None:
        """Adds what these processes map now."""
        seen = {name for name in procfs.shared_memory(pids) if self._created_by_us(name)} - self._names
        if seen:
            self._names |= seen
            temporary = self._file.with_suffix(".tmp")
            temporary.write_text(json.dumps(sorted(self._names)))
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
        try:
            return (procfs.SHM / name).stat().st_ino != self._strangers.get(name)
        except OSError:
            return False


def existing() -> dict[str, int]:
    """Names in /dev/shm now -> inode: a later segment of the same name is another one."""
    found = {}
    for path in procfs.SHM.iterdir():
        try:
            found[path.name] = path.stat().st_ino
        except OSError:
            continue
    return found
