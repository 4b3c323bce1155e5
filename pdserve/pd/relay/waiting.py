"""Waiting for one thing while others may end the wait: the client leaves, a worker dies, time is up.

A Watch is poked by whatever may have changed something, and looks for itself before it wakes its request: one
future at a time, no tasks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from typing import Final, TypeVar

from pdserve.pd.errors import ApiError, ClientGoneError
from pdserve.pd.relay.client import Client
from pdserve.pd.relay.leg import Leg
from pdserve.pd.workers.failure import WorkerFailedError
from pdserve.pd.workers.registry import Worker
from pdserve.pd.workers.wakeable import Wakeable

T = TypeVar("T")
EARLY_SECONDS: Final = 0.005
"""A timer of the event loop may come so much before the time that it was set for."""


class Watch(Wakeable):
    """Watches what may interrupt an attempt: its client, and the death of a worker that it uses.

    The lives are taken once, so that a worker that dies and comes back at once is still a death for this attempt. It
    must be left with `end`, or workers and client keep poking it.
    """

    __slots__ = ("_future", "_lives", "_loop", "_ready", "_silent", "client", "legs")

    def __init__(self, client: Client, workers: Collection[Worker]) -> None:
        self.client = client
        self.legs: tuple[Leg, ...] = ()
        """Those that are sent, in the order in which their answers come."""
        self._silent: Worker | None = None
        self._lives: dict[Worker, int] = {}
        self._loop = asyncio.get_running_loop()
        self._future: asyncio.Future[None] | None = None
        self._ready: Callable[[], object] | None = None
        client.watch = self
        for worker in workers:
            self._lives[worker] = worker.deaths
            worker.watches.add(self)

    def poke(self) -> None:
        if self._ready is not None and self._ready():
            self.wake()

    def wake(self) -> None:
        future = self._future
        if future is not None and not future.done():
            future.set_result(None)

    def check(self) -> None:
        """Raise what has happened, if anything has: ClientGoneError, ApiError (time is up, shutdown) or
        WorkerFailedError."""
        if self.client.interruption is not None:
            raise self.client.interruption
        for worker, deaths in self._lives.items():
            if worker.deaths != deaths:
                computed = any(leg.worker is worker and not leg.complete for leg in self.legs)
                error = ApiError(502, f"{worker.name} died")
                raise WorkerFailedError(worker, error, retry=True, fault="lost" if computed else None)
        if self._silent is not None:
            error = ApiError(504, f"{self._silent.name} does not answer, and others do")
            raise WorkerFailedError(self._silent, error, retry=True, fault="silent")

    @property
    def awaited(self) -> Leg | None:
        """Return the leg whose first byte is missing. None: the client has one, or nothing was sent."""
        if not self.client.started:
            for leg in self.legs:
                if not leg.settled:
                    return leg
        return None

    def leave(self, worker: Worker) -> None:
        """Note that the worker that is waited for keeps silent."""
        self._silent = worker
        self.wake()

    def forget(self, worker: Worker) -> None:
        """Forget a worker: its death no longer matters."""
        self._lives.pop(worker, None)
        worker.watches.discard(self)

    def end(self) -> None:
        for worker in self._lives:
            worker.watches.discard(self)
        self._lives.clear()
        self.legs = ()
        if self.client.watch is self:
            self.client.watch = None

    async def until(self, ready: Callable[[], object]) -> None:
        """Return when `ready()` is true, raise when something interrupts."""
        self._ready = ready
        try:
            while not ready():
                self.check()
                self._future = self._loop.create_future()
                await self._future
        finally:
            self._future = self._ready = None

    async def race(self, work: Awaitable[T], unwanted: Callable[[T], object] | None = None) -> T:
        """Return the result of `work`, which is cancelled when something interrupts. `unwanted`: gets a result that
        came in the same moment as the interruption."""
        task: asyncio.Future[T] = asyncio.ensure_future(work)
        task.add_done_callback(lambda _: self.poke())
        interruption: BaseException | None = None
        try:
            await self.until(task.done)
        except (ApiError, ClientGoneError, WorkerFailedError, asyncio.CancelledError) as error:
            interruption = error
        if interruption is None:
            return task.result()
        try:
            task.cancel()
            await asyncio.wait({task})
            if unwanted is not None and not task.cancelled() and task.exception() is None:
                unwanted(task.result())
            raise interruption
        finally:
            # Its traceback has this frame.
            interruption = None
