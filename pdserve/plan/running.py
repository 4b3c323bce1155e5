"""The places that a running deployment has: a new plan for it leaves instances, ports and names where they are.

Planned anew from nothing, one more prefill would move every decode to other devices and ports, and so restart it.
"""

from __future__ import annotations

from collections.abc import Sequence

from pdserve.plan.model import Plan
from pdserve.plan.node import Node
from pdserve.plan.process import Process
from pdserve.recipe.model import Ports
from pdserve.roles import ProcessRole


class RunningProcesses:
    """The places of the processes of a plan. Without one there are none, and everything is placed anew."""

    def __init__(self, plan: Plan | None = None, ports: Ports | None = None) -> None:
        """Hold the processes of a plan that runs. `ports`: of the recipe that the plan was made from; what another
        recipe numbers otherwise is moved. None: they are not known, and nothing is moved."""
        self._processes = {} if plan is None else {process.name: process for process in plan.processes}
        self._instances: dict[str, list[Process]] = {}
        for process in self._processes.values():
            if process.instance is not None:
                self._instances.setdefault(process.instance, []).append(process)
        self._ports = ports
        self._nodes = [] if plan is None else [node.name for node in plan.nodes]

    def __bool__(self) -> bool:
        return bool(self._processes)

    def order(self, nodes: Sequence[Node]) -> list[Node]:
        """Return the nodes in the order of that plan, whose first one has the proxy; others last."""
        rank = {name: index for index, name in enumerate(self._nodes)}
        return sorted(nodes, key=lambda node: rank.get(node.name, len(rank)))

    def process(self, name: str) -> Process | None:
        """Return the process of that name."""
        return self._processes.get(name)

    def instance(self, name: str) -> tuple[Process, ...]:
        """Return the processes of an instance in the order of their ranks; (): there is none of that name."""
        return tuple(self._instances.get(name, ()))

    @property
    def engines(self) -> tuple[Process, ...]:
        """Return the processes of all instances."""
        return tuple(process for processes in self._instances.values() for process in processes)

    def of_role(self, role: ProcessRole) -> tuple[Process, ...]:
        """Return the processes of a role, in plan order."""
        return tuple(process for process in self._processes.values() if process.role == role)

    def moves(self, key: str, ports: Ports) -> bool:
        """Return whether a recipe with these `ports` numbers those of `key` otherwise."""
        return self._ports is not None and getattr(self._ports, key, None) != getattr(ports, key, None)

    def ports(self, role: ProcessRole, node: str, purpose: str) -> dict[str, range]:
        """Name -> ports of that purpose, of the processes of a role on a node."""
        there = (process for process in self.of_role(role) if process.node == node)
        return {process.name: ports for process in there if (ports := _ports_of(process, purpose))}


def _ports_of(process: Process, purpose: str) -> range:
    if (chosen := process.port_ranges.get(purpose)) is not None:
        return range(chosen.first, chosen.last + 1)
    first = process.ports.get(purpose)
    if first is None:
        return range(0)
    count = 1
    while process.ports.get(f"{purpose}-{count}") == first + count:
        count += 1
    return range(first, first + count)


NOTHING = RunningProcesses()


def free_name(kind: str, taken: set[str]) -> str:
    """Return the first of kind-0, kind-1, ... that is not taken; it is then."""
    index = 0
    while (name := f"{kind}-{index}") in taken:
        index += 1
    taken.add(name)
    return name
