"""Runs the command of `pdserve run` beside a ready deployment, which ends with it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

Record = Callable[..., None]
"""Writes an event to the history: (kind, **fields)."""
WhileReady = Callable[[Record], Coroutine[Any, Any, None]]
"""Begins once the deployment is ready. Its return takes the deployment down; it is cancelled when that ends first, and
a second time when it is to hurry."""


class ClientTask:
    """Runs the work once. Without work it does nothing."""

    def __init__(self, work: WhileReady | None, *, record: Record, ended: Callable[[], None]) -> None:
        """Hold the work until `begin`. `ended`: called when the work is over."""
        self._work = work
        self._record = record
        self._ended = ended
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Begin the work: the deployment is ready."""
        if self._work is not None:
            self._task = asyncio.create_task(self._work(self._record))
            self._task.add_done_callback(lambda _: self._ended())

    def hurry(self) -> None:
        """Cancel the work, whose end was asked for twice."""
        if self._task is not None:
            self._task.cancel()

    async def end(self) -> None:
        """End the work, and return once it is over. `check` raises what the work has raised: the teardown comes
        first."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    def check(self) -> None:
        """Raise what the work has raised, which is a bug of the work. It is called after `end`."""
        if self._task is not None and not self._task.cancelled() and (error := self._task.exception()) is not None:
            raise error
