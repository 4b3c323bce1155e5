"""What changes when a running deployment gets another plan: computed for `up`, and for the launcher that does it."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from pdserve.plan.model import Plan
from pdserve.plan.process import Process
from pdserve.run.directory import RunDir

LIVING = ("starting", "ready", "degraded", "done")
"""Phases of a process that need not be started."""


@dataclass(frozen=True)
class Change:
    """From the plan that runs to another one. Names of processes, in the order of their plan."""

    starting: tuple[str, ...]
    """Do not run, or run with another command or environment, or follow a command of the setup that does; and
    vllm-router, where a prefill is among them."""
    replaced: tuple[str, ...]
    """Those of them that run and are to be another process: what they hold is given back before anything is started."""
    gone: tuple[str, ...]
    """Only in the plan that runs."""
    ports: Mapping[str, frozenset[int]]
    """Node -> ports that the deployment has there itself."""
    stays: str = ""
    """What is said of commands of the setup that the new plan lacks; empty: it has all of them."""


def change(running: Plan, new: Plan, living: Collection[str]) -> Change:
    """`living`: names of processes whose phase is one of LIVING."""
    old = {process.name: process for process in running.processes}
    living = {name for name in living if name in old}
    changed = {
        process.name
        for process in new.processes
        if process.name not in living or not runs_on(old[process.name], process)
    }
    changed |= _after_setup(new, changed)
    # A process of an instance meets the others while all of them start, and never again.
    changed |= {process.name for name in changed for process in new.instance_of(name)}
    late = _router(new, changed)
    starting = tuple(process.name for process in new.processes if process.name in changed | late)
    planned = {process.name for process in new.processes}
    ports = {
        node.name: frozenset(
            port for name in living if old[name].node == node.name for port in old[name].ports.values()
        )
        for node in new.nodes
    }
    return Change(
        starting=starting,
        replaced=tuple(name for name in starting if name in living and name not in late),
        gone=tuple(name for name in old if name not in planned),
        ports=ports,
        stays=_not_undone(
            process.name for process in running.processes if process.is_setup and process.name not in planned
        ),
    )


def runs_on(running: Process, new: Process) -> bool:
    """Whether a process that runs need not be started again to be the new one. The proxy's configuration names its
    workers, but while it runs the launcher tells it which there are (`Fleet.adopt`)."""
    return _as_started(new).runs_as(_as_started(running))


def _as_started(process: Process) -> Process:
    """Without what is told to it while it runs."""
    if process.control != "stdin":
        return process
    files = {path: json.dumps({**json.loads(text), "workers": []}) for path, text in process.files.items()}
    return process.model_copy(update={"files": files})


def _router(new: Plan, changed: Collection[str]) -> set[str]:
    """vllm-router, where it lacks ids of what is started. It serves by what has stayed until that is ready."""
    if not new.gives_router_new_ids(changed):
        return set()
    return {process.name for process in new.processes if process.is_proxy} - set(changed)


def _not_undone(setup: Iterable[str]) -> str:
    """Nothing is known of how to undo a command."""
    names = ", ".join(setup)
    return f"; what {names} did stays until pdserve down and up" if names else ""


def _after_setup(new: Plan, changed: Collection[str]) -> set[str]:
    """What was prepared by a command that is run now, or not before: all that follows it on its node. The proxy needs
    nothing of it, and a deployment that runs would lose its clients."""
    prepared: dict[str, int] = {}
    for process in new.processes:
        if process.is_setup and process.name in changed:
            prepared[process.node] = min(process.start_stage, prepared.get(process.node, process.start_stage))
    return {
        process.name
        for process in new.processes
        if process.node in prepared and process.start_stage > prepared[process.node] and not process.is_proxy
    }


def recorded_change(run: RunDir, plan: Plan) -> Change:
    """From what runs in `run`, by its record, to `plan`. Raises StateError when the run has no record."""
    processes = run.read_state().processes
    return change(run.read_plan(), plan, {name for name, process in processes.items() if process.phase in LIVING})
