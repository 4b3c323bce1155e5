"""Limits of time for the start, the stop or a restart of a deployment, from its plan: who asks a launcher for one waits
at least so long for the answer."""

from __future__ import annotations

from collections.abc import Iterable

from pdserve.plan.model import Plan
from pdserve.plan.process import Process

_STAGE_SECONDS = 60.0
"""By which a stage may exceed the limits of its processes: stacks of one that is late, the KILL of one that cannot end,
an agent that answers no more."""
_AROUND_SECONDS = 240.0
"""Before the first stage and after the last one: agents come or leave, containers are cleared, ports are tried."""
_LMCACHE_TRIES = 3
"""How often a server is started before its recovery is given up."""


def stops_in_order(processes: Iterable[Process]) -> float:
    """Return the stops of all stages, one after the other as each takes its whole time."""
    return sum(_by_stage((process.stop_stage, process.stop_seconds) for process in processes))


def down_seconds(plan: Plan) -> float:
    """Return the seconds of a stop: the command of `pdserve run`, then stage after stage."""
    return plan.timeouts.stop_seconds + _STAGE_SECONDS + _stop(plan) + _AROUND_SECONDS


def apply_seconds(running: Plan, new: Plan) -> float:
    """Return the seconds of another plan on a deployment that runs, as if every instance were replaced one after the
    other; and of another change that is under way."""
    one_by_one = sum(_restart_seconds(new, process) for process in new.processes if process.is_engine)
    return 2 * (_stop_and_start(running, new) + one_by_one)


def _stop_and_start(running: Plan, new: Plan) -> float:
    starts = _by_stage((process.start_stage, process.ready_seconds) for process in new.processes)
    proofs = new.timeouts.attach_seconds + new.canary_seconds
    proofs += _STAGE_SECONDS * sum(process.fetches_weights for process in new.processes)
    return _stop(running) + sum(starts) + _STAGE_SECONDS * len(starts) + proofs + _AROUND_SECONDS


def restart_seconds(plan: Plan, name: str) -> float:
    """Return the seconds of a restart of a process with its instance, which may be on its way back by itself already;
    with what it waits for, and what comes back after it, and after a change that is under way. One that the plan does
    not have is refused at once."""
    if name not in plan.names():
        return _STAGE_SECONDS
    process = plan.instance_of(name)[0]
    if process.is_lmcache:
        tries = _LMCACHE_TRIES
    else:
        tries = 1 + (process.restart.max if process.restart.policy == "on-failure" else 0)
    again = tries * (_restart_seconds(plan, process) + process.restart.backoff_max_seconds)
    beside = sum(_restart_seconds(plan, each) for each in _restarted_beside(plan, process))
    return again + beside + plan.canary_seconds + _AROUND_SECONDS + apply_seconds(plan, plan)


def _restarted_beside(plan: Plan, process: Process) -> Iterable[Process]:
    """Yield what is restarted beside a process: servers that an engine needs, and engines that return to their server
    one after the other, before it too; a peer that was broken; and vllm-router, which has to learn of a new prefill."""
    for server in plan.lmcache:
        if process.name in server.engines:
            yield plan.process(server.process)
            yield from (plan.process(each) for each in server.engines if each != process.name)
        elif process.name == server.process:
            yield from map(plan.process, server.engines)
    if process.is_engine:
        yield from (each for each in plan.processes if each.is_store_master)
        # A peer with which no KV crosses is restarted, and waited for.
        yield from [each for each in plan.processes if each.is_engine and each.role != process.role][:1]
    if plan.proxy_kind == "vllm-router":
        yield plan.process("proxy")


def _restart_seconds(plan: Plan, process: Process) -> float:
    """Return the seconds of a restart: drained, stopped, started and proven; of an instance, all of it together."""
    members = plan.instance_of(process.name)
    stop, start = max(each.stop_seconds for each in members), max(each.ready_seconds for each in members)
    proofs = plan.timeouts.attach_seconds + 2 * plan.timeouts.canary_seconds
    return plan.proxy.drain_seconds + stop + start + proofs + 2 * _STAGE_SECONDS


def _stop(plan: Plan) -> float:
    stages = {process.stop_stage for process in plan.processes}
    return stops_in_order(plan.processes) + _STAGE_SECONDS * len(stages)


def _by_stage(limits: Iterable[tuple[int, float]]) -> list[float]:
    """Return the longest limit of each stage."""
    longest: dict[int, float] = {}
    for stage, seconds in limits:
        longest[stage] = max(seconds, longest.get(stage, 0.0))
    return list(longest.values())
