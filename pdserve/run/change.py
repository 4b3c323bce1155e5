"""What `up` starts of a deployment that runs: the part of its plan that the preflight is about."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pdserve.plan.model import Plan
from pdserve.run.directory import RunDir

_LIVING = ("starting", "ready", "degraded", "done")


@dataclass(frozen=True)
class Change:
    """From the plan that runs to another one."""

    starting: frozenset[str]
    """Names of the processes that do not run, or run otherwise."""
    replaced: frozenset[str]
    """Those of them that run: what they hold is given back before they are started."""
    ports: Mapping[str, frozenset[int]]
    """Node -> ports that the deployment has there itself."""


def change_of(run: RunDir, plan: Plan) -> Change:
    """From what runs in `run` to `plan`. Raises StateError when the run has no record."""
    state = run.read_state()
    old = {process.name: process for process in run.read_plan().processes}
    living = {name for name, process in state.processes.items() if name in old and process.phase in _LIVING}
    starting = frozenset(one.name for one in plan.processes if one.name not in living or not one.runs_as(old[one.name]))
    ports = {
        node.name: frozenset(
            port for name in living if old[name].node == node.name for port in old[name].ports.values()
        )
        for node in plan.nodes
    }
    return Change(starting, starting & living, ports)
