"""Places in the pools: a request that goes to two workers needs one in each."""

from __future__ import annotations

from collections.abc import Mapping

from pdserve.pd.admission import MAX_PRIORITY, Gate, Ticket
from pdserve.pd.client import Client
from pdserve.pd.config import ProxyConfig, WorkerRole
from pdserve.pd.registry import Registry
from pdserve.pd.settings import Admission
from pdserve.pd.shared_numbers import Numbers
from pdserve.pd.waiting import Watch


class Entrance:
    """The gates of one proxy process."""

    def __init__(self, config: ProxyConfig, registry: Registry, numbers: Numbers) -> None:
        def ready(role: WorkerRole) -> Gate:
            return Gate(role, getattr(config.admission, role), lambda: registry.ready(role), numbers)

        self.gates: Mapping[WorkerRole, Gate] = {role: ready(role) for role in registry.roles}
        registry.on_change(self.refresh)

    async def enter(self, roles: tuple[WorkerRole, ...], client: Client, priority: int, tokens: int) -> list[Ticket]:
        """A ticket for each role, in the order of the roles, which must be the same for all requests. ApiError 429 when
        a pool is full or the wait too long; ClientGoneError when the client leaves the queue."""
        tickets: list[Ticket] = []
        try:
            for role in roles:
                gate = self.gates[role]
                ticket = gate.try_admit(priority, tokens)
                if ticket is None:
                    watch = Watch(client, ())
                    try:
                        ticket = await watch.race(gate.admit(priority, tokens), unwanted=Ticket.release)
                    finally:
                        watch.end()
                tickets.append(ticket)
        finally:
            if len(tickets) < len(roles):
                for ticket in tickets:
                    ticket.release()
        return tickets

    def configure(self, admission: Admission) -> None:
        """Other limits from now on."""
        for role, gate in self.gates.items():
            gate.configure(getattr(admission, role))

    def refresh(self) -> None:
        """The workers or their figures have changed."""
        for gate in self.gates.values():
            gate.refresh()


def priority_of(asked: int | None, best: int) -> int:
    """The smaller the sooner. `best`: what the client's key allows, and gives when nothing is asked."""
    if asked is None:
        return best
    return max(best, min(asked, MAX_PRIORITY))
