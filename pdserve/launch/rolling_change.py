"""The change of a deployment that serves: from the plan that runs to another one, without a failed request.

1. What serves no client itself is started (setup, weights, cache servers), or restarted where its command changed.
2. New instances are started together, proven, and get requests.
3. Instances whose command changed are drained, stopped and started anew, one at a time a role.
4. Instances that the new plan lacks are drained and stopped.
5. The proxy takes over its new configuration.

At each moment the fleet's plan is what runs (`plan_between`), and it is on disk. The first step that fails ends the
change: an instance that does not come back by the new plan is started by the old one, everything else stays as it is,
and the next `up` goes on from there.

Where the new engines cannot exchange KV with those that run, no request may cross: the new ones stay out of routing
until both roles have some, and take over from the old ones at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, Iterable
from itertools import groupby
from typing import Any

from pdserve.errors import PdserveError, StartError, StateError
from pdserve.launch.fleet import OTHER_GENERATION, Fleet, InstanceRouting
from pdserve.launch.recovery import Recovery
from pdserve.plan.model import Plan
from pdserve.plan.process import Process
from pdserve.reach.protocol import AskNode
from pdserve.run.change import LIVING, Change, can_exchange_kv, plan_between
from pdserve.time_limit import time_limit

_OVER = ("pending", "stopped", "done")
"""Phases of a process that need not be stopped."""


class RollingChange:
    """Carries one change out. `run` is called once."""

    def __init__(
        self,
        fleet: Fleet,
        recovery: Recovery,
        new: Plan,
        changes: Change,
        *,
        same_versions: bool,
        save: Callable[[Plan], None],
    ) -> None:
        """Prepare the change. `same_versions`: what is installed is what the engines run. `save` writes the plan that
        runs; it raises StateError without room for it."""
        self._fleet, self._recovery, self._save = fleet, recovery, save
        self._instances = InstanceRouting(fleet)
        self._running, self._new = fleet.plan, new
        self._can_exchange_kv = same_versions and can_exchange_kv(fleet.plan, new)
        self._starting, self._replaced, self._gone = set(changes.starting), set(changes.replaced), set(changes.gone)
        self._left_instances = set(self._leaders(fleet.plan, self._gone)) - set(new.names())
        self._done: set[str] = set()
        self._stopped_for_room: set[str] = set()
        self._one_makes_room = asyncio.Lock()
        """Two stops of an instance would end each other: its own, and that for the one which gets its devices."""
        self._failure: PdserveError | None = None

    async def run(self) -> None:
        """Change what runs into the new plan, and return when that runs. Raises StartError, and StateError when the
        record cannot be written: the change has stopped, and what served goes on."""
        try:
            await self._change_all()
        except PdserveError:
            await self._start_what_made_room()
            raise
        for name in self._leaders(self._new, (each.name for each in self._new.processes if each.is_engine)):
            self._instances.release(name, OTHER_GENERATION)

    async def _change_all(self) -> None:
        await self._start_supporters()
        replaced = [name for name in self._leaders(self._new, self._replaced) if self._is_engine(name)]
        added = [
            name
            for name in self._leaders(self._new, self._starting - self._replaced)
            if self._is_engine(name) and name not in replaced
        ]
        engines = self._leaders(self._new, (each.name for each in self._new.processes if each.is_engine))
        if self._can_exchange_kv or not set(engines) <= {*added, *replaced}:  # the canaries of the first one decide
            await self._each(self._start(name) for name in added)
            await self._each(self._replace_in_turn(names) for names in self._by_role(replaced))
        else:
            await self._change_generation(added, replaced)
        gone = [name for name in self._running.names() if name in self._left_instances & set(self._fleet.plan.names())]
        await self._each(self._remove(name) for name in gone if self._running.process(name).is_engine)
        await self._each(self._remove(name) for name in gone if not self._running.process(name).is_engine)
        await self._change_proxy()
        self._take_over(self._new)

    def summary(self) -> str:
        """Say what was done so far, for people."""
        started = [name for name in self._new.names() if name in self._done & (self._starting - self._replaced)]
        restarted = [name for name in self._new.names() if name in self._done & self._replaced]
        gone = [process for process in self._running.processes if process.name in self._done & self._gone]
        stopped = [process.name for process in gone if not process.ends_when_done]
        parts = (("started", started), ("restarted", restarted), ("stopped", stopped))
        return "; ".join(f"{verb} {', '.join(names)}" for verb, names in parts if names) or "started nothing"

    def left(self) -> list[str]:
        """Return the processes that still run as before, and are to be changed by the next `up`."""
        return sorted((self._starting | self._gone) - self._done)

    # Steps ---------------------------------------------------------------------------------------------------------

    async def _start_supporters(self) -> None:
        """Start what engines need: stage after stage, so that what fetches weights is done before what reads them."""
        supporters = [p for p in self._new.processes if p.name in self._starting and not p.is_engine and not p.is_proxy]
        for _, stage in groupby(sorted(supporters, key=lambda p: p.start_stage), key=lambda p: p.start_stage):
            await self._each(self._start_supporter(process) for process in stage)

    async def _start_supporter(self, process: Process) -> None:
        if process.name not in self._fleet.plan.names() or self._fleet.phase_of(process.name) not in LIVING:
            await self._start(process.name)
        else:
            await self._replace(process.name)

    async def _start(self, name: str, *, hold: str | None = None) -> None:
        """Starts by the new plan what does not run, or moves, once nothing is left of its last life. `hold`: a reason
        for which it stays out of routing."""
        async with self._one_makes_room:
            await self._make_room(name)
            if self._left_of(name):
                await self._recovery.stop(name)
            self._adopt(name)
        if hold is None:
            self._instances.release(name, OTHER_GENERATION)
        else:
            self._instances.hold(name, hold)
        self._fleet.record("change", name=name, step="start")
        await self._recovery.start(name)

    async def _replace_in_turn(self, names: Iterable[str]) -> None:
        for name in names:
            if self._failure is not None:
                return
            await self._replace(name)

    async def _replace(self, name: str) -> None:
        """Replace a process, and go back to the old one if that fails. Raises what the new one died of, once the old
        one is back or has failed too."""
        self._fleet.record("change", name=name, step="replace")
        try:
            if self._fleet.phase_of(name) not in LIVING or (self._is_engine(name) and self._moves(name)):
                await self._start(name)
            elif self._new.process(name).is_lmcache:
                await self._recovery.replace_server(name, lambda: self._adopt(name), but=self._starting)
            else:
                await self._recovery.replace(name, lambda: self._adopt(name))
        except PdserveError as failure:
            self._failure = failure
            if not self._recovery.is_closed:
                await self._go_back(name, failure)
            raise

    async def _go_back(self, name: str, failure: PdserveError) -> None:
        """Starts an instance by its former command. If that fails too, its restart policy decides what follows; raises
        StartError with both deaths."""
        self._fleet.record("change", name=name, step="back", why=failure.what)
        self._done -= self._members(name)
        with contextlib.suppress(StateError):  # no room for the record: what runs matters more
            self._save(plan_between(self._running, self._new, self._done))
        self._fleet.adopt(plan_between(self._running, self._new, self._done))
        self._instances.release(name, OTHER_GENERATION)
        if self._fleet.phase_of(name) in ("ready", "degraded"):
            return  # it was not stopped yet
        try:
            await self._recovery.start(name)
        except StartError as again:
            self._recovery.recover_by_policy(name)
            raise StartError(
                f"{failure.what}; its former command, to which it was to return, fails too: {again.what}",
                where=failure.where,
                cause=failure.cause,
                todo=failure.todo,
                evidence=failure.evidence,
            ) from again

    async def _remove(self, name: str) -> None:
        if self._fleet.phase_of(name) not in _OVER:
            self._fleet.record("change", name=name, step="stop")
            await self._recovery.stop(name)
        self._adopt(name)

    async def _change_generation(self, added: list[str], replaced: list[str]) -> None:
        """Start the first half of each role anew beside the other half, let it take over, then change the second one. A
        role with one instance has no half: its requests wait for the new one (`proxy.on_empty_pool`)."""
        roles = {self._new.process(name).role for name in (*added, *replaced)}
        first = list(added)
        for names in self._by_role(replaced):
            role = self._new.process(names[0]).role
            if not any(self._new.process(name).role == role for name in added):
                first += names[: (len(names) + 1) // 2]
        second = [name for name in replaced if name not in first]
        serving = [p.name for p in self._fleet.plan.processes if p.role in roles and p.name not in first]
        self._fleet.record("change", step="generation", first=first, second=second)
        await self._each(self._recovery.stop(name) for name in first if name in replaced)
        try:
            await self._each(self._start(name, hold=OTHER_GENERATION) for name in first)
            for name in first:  # those that started side by side have not met yet
                await self._recovery.prove_pairs(name)
        except PdserveError as failure:
            if not self._recovery.is_closed:
                await self._leave_generation(first, replaced, failure)
            raise
        for name in serving:
            if name in self._fleet.plan.names():
                self._fleet.hold(name, OTHER_GENERATION)
        for name in first:
            self._instances.release(name, OTHER_GENERATION)
        await self._each(self._recovery.stop(name) for name in second)
        await self._each(self._start(name) for name in second)

    async def _leave_generation(self, first: list[str], replaced: list[str], failure: PdserveError) -> None:
        """Stops what was started of the new generation, which cannot serve without the rest."""
        await self._each(self._recovery.stop(name) for name in first if name in self._fleet.plan.names())
        for name in first:
            if name not in replaced:
                self._done -= self._members(name)
        await self._each(self._go_back(name, failure) for name in first if name in replaced)
        self._take_over(plan_between(self._running, self._new, self._done))

    async def _change_proxy(self) -> None:
        """Roll the proxy's processes where only its configuration changed; else restart it, and clients are refused
        meanwhile: two programs cannot listen on one port."""
        if "proxy" not in self._starting:
            return
        before, after = self._fleet.plan.process("proxy"), self._new.process("proxy")
        if after == before.model_copy(update={"files": after.files}) and await roll(self._fleet, after):
            self._adopt("proxy")
        else:
            await self._replace("proxy")

    # Tools ---------------------------------------------------------------------------------------------------------

    async def _make_room(self, name: str) -> None:
        """Stop what holds devices or ports that an instance gets: what is no more in the plan, or moves itself."""
        wanted = [process for process in self._new.processes if process.name in self._members(name)]
        for holder in self._leaders(self._fleet.plan, set(self._fleet.plan.names()) - self._members(name)):
            held = self._fleet.plan.instance_of(holder)
            if not any(_collide(one, other) for one in wanted for other in held):
                continue
            if holder in self._left_instances:
                await self._remove(holder)
            elif self._fleet.phase_of(holder) not in _OVER:  # one that is dead may be on its way back
                self._stopped_for_room.add(holder)
                await self._recovery.stop(holder)

    async def _start_what_made_room(self) -> None:
        """Start, after a failure, what was stopped for another one and had not its turn any more, by its former
        command."""
        for name in sorted(self._stopped_for_room - self._done):
            if not self._recovery.is_closed and self._fleet.phase_of(name) == "stopped":
                try:
                    await self._recovery.start(name)
                except PdserveError:
                    self._recovery.recover_by_policy(name)

    def _moves(self, name: str) -> bool:
        """Tell whether an instance gets devices or ports that it does not have, so that others may have to go first."""
        before, after = (
            {each.name: (each.node, each.devices, each.ports) for each in plan.instance_of(name)}
            for plan in (self._fleet.plan, self._new)
        )
        return before != after

    def _left_of(self, name: str) -> bool:
        """Tell whether something of an instance may still hold its devices and ports."""
        plan = self._fleet.plan
        return name in plan.names() and any(self._fleet.has_pending_stop(each.name) for each in plan.instance_of(name))

    def _adopt(self, name: str) -> None:
        """Takes over the new plan for one instance."""
        done = self._done | self._members(name)
        self._take_over(plan_between(self._running, self._new, done))
        self._done = done

    def _take_over(self, plan: Plan) -> None:
        self._save(plan)
        self._fleet.adopt(plan)

    def _members(self, name: str) -> set[str]:
        """Return the processes of an instance in both plans."""
        plans = [plan for plan in (self._running, self._new) if name in plan.names()]
        return {process.name for plan in plans for process in plan.instance_of(name)}

    def _is_engine(self, name: str) -> bool:
        return self._new.process(name).is_engine

    @staticmethod
    def _leaders(plan: Plan, names: Iterable[str]) -> list[str]:
        """Return who stands for the instances of these processes, in the order of the plan."""
        wanted = set(names)
        return list(dict.fromkeys(plan.instance_of(name)[0].name for name in plan.names() if name in wanted))

    def _by_role(self, names: Iterable[str]) -> list[list[str]]:
        roles: dict[str, list[str]] = {}
        for name in names:
            roles.setdefault(self._new.process(name).role, []).append(name)
        return list(roles.values())

    async def _each(self, steps: Iterable[Awaitable[None]]) -> None:
        """Takes steps side by side, each to its end. Raises the first failure, after which no other step begins."""
        results = await asyncio.gather(*steps, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                self._failure = self._failure or (result if isinstance(result, PdserveError) else None)
                raise result


def _collide(one: Process, other: Process) -> bool:
    """Tell whether two processes of a node want a device or a port of each other."""
    devices = set(one.devices) & set(other.devices)
    return one.node == other.node and bool(devices or set(one.ports.values()) & set(other.ports.values()))


_PROXY = "proxy"
_ASK_SECONDS = 5.0
_RETRY_SECONDS = 0.1


async def roll(fleet: Fleet, process: Process | None = None) -> bool:
    """Restart the proxy's processes without refusing a connection, and return whether new ones serve. What runs in the
    old ones goes on there. False: this proxy has no rolling restart. Raises StartError when the new ones could not
    start; the old ones serve on then. `process`: the proxy with another configuration, which the new processes get;
    None: as it is."""
    process = process or fleet.plan.process(_PROXY)
    if process.control != "stdin" or len(process.files) != 1 or fleet.phase_of(_PROXY) != "ready":
        return False
    if not (fleet.run.path / process.log).exists():  # deleted with the record: only a new start makes one
        return False
    ask, url = fleet.on_node_of(_PROXY), f"{fleet.plan.proxy_url}/health"
    before = await _state_of(ask, url)
    if not isinstance(before.get("generation"), int):
        return False
    # Its file may be gone with the record of the run.
    (config,) = process.files.values()
    fleet.push(_PROXY, "restart", {"restart": True, "config": config})
    fleet.record("rolling", name=_PROXY)
    why = f"its new processes did not serve within {process.ready_seconds:.0f} s"
    try:
        async with time_limit(process.ready_seconds):
            while True:
                state = await _state_of(ask, url)
                generation = state.get("generation")
                if isinstance(generation, int) and generation > before["generation"]:
                    fleet.record("rolled", name=_PROXY)
                    return True
                if state and state.get("not_restarted") != before.get("not_restarted"):
                    why = str(state.get("not_restarted"))
                    break
                await asyncio.sleep(_RETRY_SECONDS)
    except TimeoutError:
        pass
    fleet.record("not_rolled", name=_PROXY, why=why)
    raise StartError(
        f"the proxy was not replaced: {why}",
        where=_PROXY,
        cause="the program or its configuration is not what it was when the one that serves was started",
        todo=f"pdserve logs {_PROXY}; the old one serves on",
    )


async def _state_of(ask: AskNode, url: str) -> dict[str, Any]:
    """Return the proxy's /health; empty if there is no answer, or another one."""
    answer = await ask("GET", url, seconds=_ASK_SECONDS)
    try:
        state = json.loads(answer.body)
    except ValueError:
        return {}
    return state if isinstance(state, dict) else {}
