"""The state of a deployment as `status` and `down` read it: written by the launcher only."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from pdserve.plan.frozen import SCHEMA, SchemaVersion
from pdserve.roles import ProcessRole
from pdserve.system.cgroup import CgroupId
from pdserve.system.procfs import Place, ProcessId

Phase = Literal["starting", "ready", "degraded", "draining", "failed", "stopped"]
"""failed: it does not serve, but what is healthy was kept running (--keep-on-failure)."""

ProcessPhase = Literal["pending", "starting", "ready", "degraded", "draining", "done", "dead", "stopped"]
"""degraded: alive but not routed to (not answering, or its cache server is being replaced). done: it had one thing to
do, and has ended with it done (a command of the setup, the download of weights)."""


class ProcessState(BaseModel):
    """Holds the state of one process. Times are wall-clock seconds (time.time)."""

    model_config = ConfigDict(extra="forbid")

    role: ProcessRole
    node: str
    phase: ProcessPhase = "pending"
    id: ProcessId | None = None
    started_at: float | None = None
    ready_at: float | None = None
    start_seconds: float | None = None
    died_at: float | None = None
    """The time of its last end; it counts while the phase is dead, done or stopped."""
    restarts: int = 0
    note: str = ""
    """Why it is not ready: how it died, why it is held, or what its start is doing."""
    open_ports: dict[str, int] = {}
    """Ports read after the start because they cannot be pinned."""


class NodeState(BaseModel):
    """The agent of a node and the guard that outlives it."""

    model_config = ConfigDict(extra="forbid")

    agent: ProcessId
    guard: ProcessId
    hostname: str
    """The hostname of the machine on which both of them and its processes are."""
    place: Place | None = None
    """Where their PIDs count; None: it was not to be read."""
    cgroup: CgroupId | None = None
    """In which each of its processes has one of its own."""
    no_cgroup: str = ""
    """Why there is none."""
    lost: str = ""
    """Why the launcher no longer hears it; empty while it does."""


class DeploymentState(BaseModel):
    """Is a state.json: the state of a deployment."""

    model_config = ConfigDict(extra="forbid")

    schema_version: SchemaVersion = SCHEMA
    name: str
    run_id: str
    phase: Phase = "starting"
    host: str
    place: Place | None = None
    """Where the PID of the launcher counts; None: as for a node."""
    launcher: ProcessId
    token: str = Field(min_length=1)
    """In the names of its processes (system/process.py)."""
    command: ProcessId | None = None
    """The command of `pdserve run`, once it was started: a process of the launcher's machine."""
    nodes: dict[str, NodeState] = {}
    processes: dict[str, ProcessState] = {}
    endpoint: str = ""
    note: str = ""
    change: str = ""
    """The last change by an `up`: under way, or where it stopped; empty: it is done."""
    started_at: float
    ready_at: float | None = None
