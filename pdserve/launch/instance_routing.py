"""Routing of whole engine instances: with hybrid or external load balancing one has several workers of the proxy."""

from __future__ import annotations

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
