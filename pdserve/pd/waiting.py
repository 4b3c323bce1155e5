"""Waiting for one thing while others may end the wait: the client leaves, a worker dies, time is up."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Collection
from typing import Any, TypeVar

from pdserve.pd.errors import ApiError, WorkerFailedError
from pdserve.pd.registry import Worker
from pdserve.pd.relay import Client

T = TypeVar("T")


class Watch:
    """What may interrupt an attempt: its client, and the death of a worker that it uses.

    The futures are taken once, so that a worker that dies and comes back at once is still a death for this attempt.
    """

    def __init__(self, client: Client, workers: Collection[Worker]) -> None:
        self._client = client
        self._lost = {worker.lost: worker for worker in workers}

    def check(self) -> None:
        """Raise what has happened: ClientGoneError, ApiError (time is up, shutdown) or WorkerFailedError."""
        if self._client.interrupted.done():
            raise self._client.interrupted.result()
        for lost, worker in self._lost.items():
            if lost.done():
                raise WorkerFailedError(worker, ApiError(502, f"{worker.name} died"), retry=True)

    def forget(self, worker: Worker) -> None:
        """Its death no longer matters."""
        self._lost = {lost: other for lost, other in self._lost.items() if other is not worker}

    async def first(self, *tasks: asyncio.Future[Any]) -> None:
        """Return when one of `tasks` is done, raise when something interrupts. Cancels nothing."""
        waits: set[asyncio.Future[Any]] = {*tasks, self._client.interrupted, *self._lost}
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        if not any(task.done() for task in tasks):
            self.check()

    async def race(self, work: Awaitable[T]) -> T:
        """The result of `work`, which is cancelled when something interrupts."""
        task = asyncio.ensure_future(work)
        try:
            await self.first(task)
            return await task
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait({task})
