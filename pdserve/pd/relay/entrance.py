"""Places in the pools: a request that goes to two workers needs one in each."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from pdserve.pd.config.proxy import ProxyConfig
from pdserve.pd.config.settings import AdmissionSettings
from pdserve.pd.limits.admission import AdmissionGate, Ticket
from pdserve.pd.processes.shared_numbers import Numbers
from pdserve.pd.relay.client import Client
from pdserve.pd.relay.waiting import Watch
from pdserve.pd.workers.registry import Registry
from pdserve.roles import EngineRole


class Entrance:
    """The gates of one proxy process."""

    def __init__(self, config: ProxyConfig, registry: Registry, numbers: Numbers) -> None:
        def ready(role: EngineRole) -> AdmissionGate:
            limits = getattr(config.admission, role)
            return AdmissionGate(role, limits, lambda: registry.ready(role), numbers, lambda: registry.no_worker(role))

        self.gates: Mapping[EngineRole, AdmissionGate] = {role: ready(role) for role in registry.roles}
        registry.on_change(self.refresh)

    def enter_now(self, roles: tuple[EngineRole, ...], priority: int, tokens: int) -> list[Ticket]:
        """Return a ticket for each role up to the first that has no place now: if they are fewer than the roles,
        `enter` must have the others, or they be released."""
        tickets: list[Ticket] = []
        for role in roles:
            ticket = self.gates[role].try_admit(priority, tokens)
            if ticket is None:
                break
            tickets.append(ticket)
        return tickets

    def turns_away(self, priority: int, tokens: int) -> bool:
        """Tell whether a request that comes now gets 429 at once."""
        return any(gate.turns_away(priority, tokens) for gate in self.gates.values())

    async def enter(
        self, tickets: list[Ticket], roles: tuple[EngineRole, ...], client: Client, priority: int, tokens: int
    ) -> list[Ticket]:
        """Return what `enter_now` gave, and a ticket for each role that it had none for, in the order of the roles,
        which must be the same for all requests. Raises ApiError 429 when a pool is full or the wait too long,
        ClientGoneError when the client leaves the queue: then all tickets are released."""
        try:
            for role in roles[len(tickets) :]:
                gate = self.gates[role]
                ticket = gate.try_admit(priority, tokens)
                if ticket is None:
                    watch = Watch(client, ())
                    try:
                        ticket = await watch.race(admit(gate, priority, tokens), unwanted=Ticket.release)
                    finally:
                        watch.end()
                tickets.append(ticket)
        finally:
            if len(tickets) < len(roles):
                for ticket in tickets:
                    ticket.release()
        return tickets

    def configure(self, admission: AdmissionSettings) -> None:
        """Take other limits from now on."""
        for role, gate in self.gates.items():
            gate.configure(getattr(admission, role))

    def refresh(self) -> None:
        """Look anew who may enter: the workers or their figures have changed."""
        for gate in self.gates.values():
            gate.refresh()


async def admit(gate: AdmissionGate, priority: int = 0, tokens: int = 0) -> Ticket:
    """Return a ticket, after waiting for it if need be. `priority`: the smaller the sooner. Raises ApiError, 429 when
    the queue is full or the time is over. Cancelling it is leaving the queue."""
    ticket = gate.try_admit(priority, tokens)
    if ticket is not None:
        return ticket
    waiter = gate.enqueue(priority, tokens)
    try:
        return await waiter.future
    except asyncio.CancelledError:
        gate.left(waiter)
        raise
    finally:
        if waiter.timer is not None:
            waiter.timer.cancel()
