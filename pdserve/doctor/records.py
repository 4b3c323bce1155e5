"""What was read of a run, as data: the rules see this and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pdserve.installed.versions import Versions
from pdserve.observe.engine_metrics import EngineSnapshot, LmcacheSnapshot
from pdserve.observe.proxy_metrics import ProxySnapshot
from pdserve.observe.store_metrics import StoreSnapshot
from pdserve.plan.model import Plan
from pdserve.run.state import DeploymentState
from pdserve.system.pressure import Pressure


@dataclass(frozen=True)
class ProcessLog:
    """The lines of one process, without colours. A long log is its beginning and its end."""

    process: str
    role: str
    file: str
    """Relative to the run directory."""
    lines: tuple[str, ...]


@dataclass(frozen=True)
class Failure:
    """What failure.md says, which is all that there is of a run that failed before it started a process."""

    what: str
    cause: str = ""
    todo: str = ""


@dataclass(frozen=True)
class LiveFigures:
    """What the processes report now, by name; empty for a run that is over."""

    engines: Mapping[str, EngineSnapshot] = field(default_factory=dict)
    caches: Mapping[str, LmcacheSnapshot] = field(default_factory=dict)
    stores: Mapping[str, StoreSnapshot] = field(default_factory=dict)
    proxy: ProxySnapshot | None = None
    pressure: Mapping[str, Pressure] = field(default_factory=dict)
    """Of the processes on this machine."""


@dataclass(frozen=True)
class RunRecords:
    """Everything but the logs, which are read one by one because they may be long."""

    run_dir: str
    phase: str
    """As `pdserve status` shows it; empty: nothing was started."""
    alive: bool = False
    """Its launcher lives."""
    state: DeploymentState | None = None
    plan: Plan | None = None
    versions: Versions = field(default_factory=Versions)
    """As preflight has recorded them."""
    recipe: Mapping[str, Any] = field(default_factory=dict)
    """The resolved recipe, as a document."""
    failure: Failure | None = None
    events: tuple[Mapping[str, Any], ...] = ()
    live: LiveFigures = field(default_factory=LiveFigures)
    unread: tuple[str, ...] = ()
    """What could not be read, each with why."""

    def role(self, process: str) -> str:
        """By the plan, else by the name: prefill-0 is a prefill."""
        for planned in self.plan.processes if self.plan is not None else ():
            if planned.name == process:
                return planned.role
        return process.rpartition("-")[0] or process
