"""Whole engine instances: with hybrid or external load balancing one has several workers of the proxy, and over several
nodes it has processes that serve nothing by themselves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from pdserve.launch.fleet import Fleet, Routing


class InstanceRouting:
    """What the fleet does to one worker, done to all of an instance: its ranks serve together or not at all."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def servers(self, name: str) -> list[str]:
        """The API servers of the instance of a process. Of anything else, the process itself."""
        return [process.name for process in self._fleet.plan.instance_of(name) if process.probe is not None]

    def route(self, name: str, routing: Routing) -> None:
        """Tells the proxy what it may send there."""
        for server in self.servers(name):
            self._fleet.route(server, routing)

    def hold(self, name: str, reason: str) -> None:
        """Takes it out of routing for a reason."""
        for server in self.servers(name):
            self._fleet.hold(server, reason)

    def release(self, name: str, reason: str) -> None:
        """Takes a reason back."""
        for server in self.servers(name):
            self._fleet.release(server, reason)

    def serves(self, name: str) -> bool:
        """One process was ready, and lives; held or silent it may be."""
        return self._fleet.phase_of(name) in ("ready", "degraded")

    async def comes(self, name: str) -> bool:
        """After a start of its processes: whether all of them became ready."""
        processes = self._fleet.plan.instance_of(name)
        return all(await asyncio.gather(*(self._fleet.outcome(process.name) for process in processes)))

    def lives(self, name: str) -> Callable[[], bool]:
        """Whether no process of an instance is dead."""
        processes = [process.name for process in self._fleet.plan.instance_of(name)]
        return lambda: all(self._fleet.phase_of(process) != "dead" for process in processes)
