"""Whole engine instances: with hybrid or external load balancing one has several workers of the proxy, and over several
nodes it has processes that serve nothing by themselves."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from pdserve.launch.canary import until_idle
from pdserve.launch.fleet import Fleet, Routing
from pdserve.time_limit import time_limit


class InstanceRouting:
    """Does to all ranks of an instance what the fleet does to one worker: they serve together or not at all."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def servers(self, name: str) -> list[str]:
        """Return the API servers of a process's instance. For what is no part of an instance, return the process
        itself."""
        return [process.name for process in self._fleet.plan.instance_of(name) if process.probe is not None]

    def route(self, name: str, routing: Routing) -> None:
        """Tell the proxy what it may send to the servers of an instance."""
        for server in self.servers(name):
            self._fleet.route(server, routing)

    def hold(self, name: str, reason: str) -> None:
        """Take the servers of an instance out of routing for a reason."""
        for server in self.servers(name):
            self._fleet.hold(server, reason)

    def release(self, name: str, reason: str) -> None:
        """Take back a reason to hold the servers of an instance."""
        for server in self.servers(name):
            self._fleet.release(server, reason)

    async def drained(self, name: str, *, key: str) -> None:
        """Waits until the proxy has no request running there, for as long as the recipe lets requests finish. `key`: of
        the engines."""
        workers = {worker.name for worker in self._fleet.plan.proxy.workers}
        await asyncio.gather(*(self._idle(server, key) for server in self.servers(name) if server in workers))

    async def _idle(self, worker: str, key: str) -> None:
        plan, ask = self._fleet.plan, self._fleet.on_node_of("proxy")
        with contextlib.suppress(TimeoutError):
            async with time_limit(plan.proxy.drain_seconds):
                await until_idle(ask, plan.proxy_url, worker, key=key)

    def serves(self, name: str) -> bool:
        """Tell whether one process was ready, and lives; held or silent it may be."""
        return self._fleet.phase_of(name) in ("ready", "degraded")

    async def all_ready(self, name: str) -> bool:
        """Wait until each of its processes is ready, dead or late; True if all became ready."""
        processes = self._fleet.plan.instance_of(name)
        return all(await asyncio.gather(*(self._fleet.outcome(process.name) for process in processes)))

    def lives(self, name: str) -> Callable[[], bool]:
        """Return a condition: no process of an instance is dead."""
        processes = [process.name for process in self._fleet.plan.instance_of(name)]
        return lambda: all(self._fleet.phase_of(process) != "dead" for process in processes)

    def first_dead(self, name: str) -> str | None:
        """Return the first process of an instance that is dead."""
        dead = (p.name for p in self._fleet.plan.instance_of(name) if self._fleet.phase_of(p.name) == "dead")
        return next(dead, None)
