"""Keeps what an agent leaves in its run directory before it starts anything: who its guard is, and its cgroup.

    <run directory>/agent@<node>-<PID of the guard>.json

The launcher's record has the same of the agents that it has heard. This one is there also if all of them were killed
before that, and of agents that were replaced.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from pdserve.atomic_write import replace_text
from pdserve.system import cgroup, procfs
from pdserve.system.cgroup import Cgroup, CgroupId
from pdserve.system.host import is_here
from pdserve.system.procfs import Place, ProcessId


def ledger_file(run_dir: Path, node: str) -> Path:
    """Return the ledger of a node's shared memory: in the run directory, so that it outlives its agent."""
    return run_dir / f"shm@{node}.json"


class AgentRecord(BaseModel):
    """Describes one agent. Its processes are descendants of its guard while that lives, and in its cgroup if it has
    one."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    guard: ProcessId
    hostname: str
    place: Place | None
    cgroup: CgroupId | None
    over: bool = False
    """Its guard has left by itself, which it does when nothing lives that it would have to stop."""

    @property
    def here(self) -> bool:
        """Tell whether the PIDs of the record mean the same to us."""
        return is_here(self.hostname, self.place)

    def shows_all(self) -> bool:
        """Tell whether the kernel shows every process of it here: nothing that it has started gets away from a guard
        that lives, nor out of a cgroup. A cgroup that was removed was empty."""
        return self.over or self.guard.alive() or (self.cgroup is not None and cgroup.is_known(self.cgroup))


def note(run_dir: Path, node: str, made: Cgroup | None, *, over: bool = False) -> None:
    """Write the guard's record. One that cannot be written is missed only after the launcher was killed too."""
    guard = procfs.identify(os.getpid())
    assert guard is not None
    record = AgentRecord(
        guard=guard,
        hostname=socket.gethostname(),
        place=procfs.place(),
        cgroup=None if made is None else made.id,
        over=over,
    )
    with contextlib.suppress(OSError):
        replace_text(run_dir / f"agent@{node}-{guard.pid}.json", record.model_dump_json())


def records(run_dir: Path) -> list[AgentRecord]:
    """Return the records of all agents that the run has had, on whatever machine."""
    return [record for _, record in _records(run_dir)]


def _records(run_dir: Path) -> Iterator[tuple[Path, AgentRecord]]:
    for file in sorted(run_dir.glob("agent@*.json")):
        with contextlib.suppress(OSError, ValidationError):
            yield file, AgentRecord.model_validate_json(file.read_bytes())


def remove_empty_cgroups(run_dir: Path, run_id: str) -> None:
    """Remove the cgroups of this machine's dead guards, as far as no process is in them."""
    for _, record in _records(run_dir):
        if record.cgroup is None or not record.here or record.guard.alive():
            continue
        if (group := cgroup.find_recorded_cgroup(record.cgroup, run_id)) is not None:
            group.remove()
