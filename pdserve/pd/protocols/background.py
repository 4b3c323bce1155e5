"""Work that goes on after a client has its answer, or has left."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from pdserve.pd.relay.leg import Leg, ignore_poke
from pdserve.time_limit import time_limit


class Background:
    """Owns its tasks until they end."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def drained(self) -> None:
        """Returns when nothing is running any more."""
        while self._tasks:
            await asyncio.wait(self._tasks)


async def settle(legs: tuple[Leg, ...], ready: Callable[[], object], seconds: float | None = None) -> None:
    """Waits for legs whose request no longer watches them: until `ready()` is true, or the time is over."""
    changed = asyncio.Event()
    for leg in legs:
        leg.poke, leg.poke_on_reached = changed.set, True
    try:
        async with time_limit(seconds):
            while not ready():
                await changed.wait()
                changed.clear()
    except TimeoutError:
        pass
    finally:
        for leg in legs:
            leg.poke = ignore_poke
