"""Compute what changes when a running deployment gets another plan: computed for `up`, and for the launcher that does
it."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from pdserve.plan.model import LmcacheServer, Plan
from pdserve.plan.process import Process
from pdserve.plan.proxy import CONFIG_FILE
from pdserve.run.directory import RunDir

LIVING = ("starting", "ready", "degraded", "done")
"""Phases of a process that need not be started."""


@dataclass(frozen=True)
class Change:
    """The change from the plan that runs to another one. Names of processes, in the order of their plan."""

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
    """Compare a plan that runs with a new one. `living`: names of processes whose phase is one of LIVING."""
    old = {process.name: process for process in running.processes}
    living = {name for name in living if name in old}
    changed = {
        process.name
        for process in new.processes
        if process.name not in living or not can_run_on(old[process.name], process)
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


def can_run_on(running: Process, new: Process) -> bool:
    """Return whether a process that runs need not be started again to be the new one. The proxy's configuration names
    its workers, but while it runs the launcher tells it which there are (`Fleet.adopt`)."""
    return _without_control(new) == _without_control(running)


def _without_control(process: Process) -> Process:
    """Return a process without what is told to it while it runs."""
    if process.control != "stdin":
        return process
    files = {path: json.dumps({**json.loads(text), "workers": []}) for path, text in process.files.items()}
    return process.model_copy(update={"files": files})


def _router(new: Plan, changed: Collection[str]) -> set[str]:
    """Return vllm-router's process, where it lacks ids of what is started. It serves by what has stayed until that is
    ready."""
    if not new.gives_router_new_ids(changed):
        return set()
    return {process.name for process in new.processes if process.is_proxy} - set(changed)


def _not_undone(setup: Iterable[str]) -> str:
    """Say that what setup did stays: nothing is known of how to undo a command."""
    names = ", ".join(setup)
    return f"; what {names} did stays until pdserve down and up" if names else ""


def _after_setup(new: Plan, changed: Collection[str]) -> set[str]:
    """Return what was prepared by a command that is run now, or not before: all that follows it on its node. The proxy
    needs nothing of it, and a deployment that runs would lose its clients."""
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
    """Return the change from what runs in `run`, by its record, to `plan`. Raises StateError when the run has no
    record."""
    processes = run.read_state().processes
    return change(run.read_plan(), plan, {name for name, process in processes.items() if process.phase in LIVING})


def plan_between(running: Plan, new: Plan, done: Collection[str]) -> Plan:
    """Return the plan of a deployment on its way from `running` to `new`, of which `done` (names of processes) is done:
    processes that were started or restarted are as in `new`, stopped ones are gone, and all others are as in
    `running`."""
    old = {process.name: process for process in running.processes}
    planned = {process.name: process for process in new.processes}
    processes = [planned[name] if name in done else old[name] for name in planned if name in done or name in old]
    processes += [process for name, process in old.items() if name not in planned and name not in done]

    def of(name: str) -> Plan:
        return new if name in done else running

    names = {process.name for process in processes}
    workers = [
        worker
        for plan in (running, new)
        for worker in plan.proxy.workers
        if worker.name in names and of(worker.name) is plan
    ]
    order = list(dict.fromkeys([*planned, *old]))
    workers.sort(key=lambda worker: order.index(worker.name))
    proxy = of("proxy").proxy.model_copy(update={"workers": tuple(workers)})
    return new.model_copy(
        update={
            "nodes": tuple({node.name: node for node in (*running.nodes, *new.nodes)}.values()),
            "processes": tuple(
                _with_workers(process, proxy.model_dump_json(indent=2)) if process.is_proxy else process
                for process in processes
            ),
            "lmcache": tuple(_servers_between(processes, of)),
            "proxy": proxy,
            "proxy_kind": of("proxy").proxy_kind,
            "exposed": tuple(
                exposure
                for plan in (running, new)
                for exposure in plan.exposed
                if exposure.process in names and of(exposure.process) is plan
            ),
        }
    )


def _with_workers(process: Process, config: str) -> Process:
    """Return the proxy with the configuration that it gets when it has to be started again."""
    if CONFIG_FILE not in process.files:
        return process
    return process.model_copy(update={"files": {**process.files, CONFIG_FILE: config + "\n"}})


def _servers_between(processes: Iterable[Process], of: Callable[[str], Plan]) -> Iterator[LmcacheServer]:
    """Yield the cache servers, each with the engines that attach to it as they run."""
    processes = list(processes)
    for process in processes:
        server = next((each for each in of(process.name).lmcache if each.process == process.name), None)
        if server is None:
            continue
        workers = {
            engine.name: each.workers_of[engine.name]
            for engine in processes
            for each in of(engine.name).lmcache
            if each.process == process.name and engine.name in each.workers_of
        }
        yield server.model_copy(
            update={
                "engines": tuple(workers),
                "workers_of": workers,
                "expected_workers": sum(workers.values()),
            }
        )


_GENERATION_FLAGS = ("--block-size", "--kv-cache-dtype", "--dtype", "--quantization", "--revision", "--hf-overrides")
"""Flags of vLLM by which both sides of a transfer must agree. NIXL refuses the handshake of two engines that differ in
them (compatibility hash, vllm nixl/metadata.py); Mooncake copies blocks of the wrong size."""


def can_exchange_kv(running: Plan, new: Plan) -> bool:
    """Return whether the engines of both plans can hand KV to each other: the same model, program, connectors and
    layout of blocks in every role that both have."""
    if (running.model, running.revision, running.mode) != (new.model, new.revision, new.mode):
        return False
    before, after = _generation(running), _generation(new)
    return all(before[role] == after[role] for role in before.keys() & after.keys())


def _generation(plan: Plan) -> dict[str, set[object]]:
    """Return what decides with whom the engines of a role can exchange KV."""
    found: dict[str, set[object]] = {}
    for process in plan.processes:
        if process.is_engine:
            argv = process.argv
            flags = tuple((flag, argv[argv.index(flag) + 1]) for flag in _GENERATION_FLAGS if flag in argv[:-1])
            connectors = tuple(connector.class_name for connector in process.connectors)
            found.setdefault(process.role, set()).add((argv[:3], flags, connectors))
    return found
