"""The workers and their states, as the launcher tells them, and the choice of one.

A worker is chosen only while it is ready. Its death is an event that every request at it is waiting for.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection, Sequence
from typing import Literal, get_args

from pdserve.pd.config import ProxyConfig, WorkerConfig, WorkerRole
from pdserve.pd.errors import ApiError

WorkerState = Literal["starting", "ready", "draining", "dead"]
STATES: tuple[WorkerState, ...] = get_args(WorkerState)
RETRY_AFTER_SECONDS = 5


class Worker:
    """One engine. Must be made inside a running event loop."""

    def __init__(self, config: WorkerConfig, transfer_slots: int) -> None:
        self.config = config
        self.state: WorkerState = "starting"
        self.in_flight = 0
        """Legs that are open at it now."""
        self.served = 0
        """Legs ever sent to it."""
        self.life = 0
        """Grows each time that it comes up: what was learnt of an earlier life is void."""
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when it dies; a new one for each life."""
        # One below the sender tasks of the prefill: if all of them waited for prefills that are not finished, those
        # that are could not be sent, and would keep the blocks that the others need.
        self.slots = asyncio.Semaphore(max(1, transfer_slots - 1))

    @property
    def name(self) -> str:
        return self.config.name

    def describe(self) -> dict[str, str | int]:
        return {
            "name": self.name,
            "role": self.config.role,
            "state": self.state,
            "in_flight": self.in_flight,
            "served": self.served,
        }


class Registry:
    """All workers of the deployment."""

    def __init__(self, config: ProxyConfig) -> None:
        self.workers = {worker.name: Worker(worker, config.transfer_slots) for worker in config.workers}
        self.roles: tuple[WorkerRole, ...] = (
            ("aggregated",) if config.protocol == "aggregated" else ("prefill", "decode")
        )
        self._turn = 0
        self._listeners: list[Callable[[Worker], None]] = []

    def on_ready(self, listener: Callable[[Worker], None]) -> None:
        """Called with each worker that becomes ready."""
        self._listeners.append(listener)

    def set_state(self, name: str, state: WorkerState) -> None:
        """KeyError: no such worker."""
        worker = self.workers[name]
        before, worker.state = worker.state, state
        if state == "dead" and not worker.lost.done():
            worker.lost.set_result(None)
        if state == "ready" and before in ("starting", "dead"):
            worker.life += 1
            if worker.lost.done():
                worker.lost = asyncio.get_running_loop().create_future()
        if state == "ready" and before != "ready":
            for listener in self._listeners:
                listener(worker)

    def set_all_ready(self) -> None:
        for name in self.workers:
            self.set_state(name, "ready")

    def ready(self, role: WorkerRole, avoid: Collection[Worker] = ()) -> list[Worker]:
        return [
            worker
            for worker in self.workers.values()
            if worker.config.role == role and worker.state == "ready" and worker not in avoid
        ]

    def empty_pools(self) -> list[WorkerRole]:
        """Roles without a ready worker: while there is one, nothing can be served."""
        return [role for role in self.roles if not self.ready(role)]

    def pick(self, role: WorkerRole, avoid: Collection[Worker] = ()) -> Worker:
        """The next worker of a role; 503 when there is none."""
        self._turn += 1
        workers = self._pool(role, avoid)
        return workers[self._turn % len(workers)]

    def pick_pair(self, avoid: Collection[Worker] = ()) -> tuple[Worker, Worker]:
        """The next prefill and decode. Every pair has its turn: with two counters in step, equal pools would only
        ever form the pairs (0, 0) and (1, 1)."""
        prefills, decodes = self._pool("prefill", avoid), self._pool("decode", avoid)
        turn = self._turn
        self._turn += 1
        decode = decodes[(turn + turn // math.lcm(len(prefills), len(decodes))) % len(decodes)]
        free = [worker for worker in prefills if not worker.slots.locked()]
        if prefills[turn % len(prefills)] in free or not free:
            return prefills[turn % len(prefills)], decode
        return free[turn % len(free)], decode

    def _pool(self, role: WorkerRole, avoid: Collection[Worker]) -> Sequence[Worker]:
        workers = self.ready(role, avoid)
        if not workers:
            raise ApiError(503, f"No {role} worker is ready.", retry_after=RETRY_AFTER_SECONDS)
        return workers
