"""A time limit for what a coroutine waits for, that also holds while its cancelled task cleans up.

`asyncio.timeout` of Python 3.11.0 to 3.11.3 raises CancelledError in place of TimeoutError in a task that was cancelled
before (cpython#102780), so that a stop never came to its KILL; Debian 12 has 3.11.2. `asyncio.wait_for` of 3.11 goes on
when it is cancelled at the moment at which it ends (cpython#86296). This module can go when 3.12 is the oldest that we
take.
"""

from __future__ import annotations

import asyncio
from types import TracebackType


class time_limit:  # noqa: N801  (read as asyncio.timeout is)
    """Raises TimeoutError where its block takes longer: `async with time_limit(seconds)`. None: no limit."""

    def __init__(self, seconds: float | None) -> None:
        self._seconds = seconds
        self._timer: asyncio.TimerHandle | None = None
        self._is_over = False

    async def __aenter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._cancellations = task.cancelling()
        if self._seconds is not None:
            # With no time left too, the block runs until it waits for the first time.
            self._timer = task.get_loop().call_later(max(0.0, self._seconds), self._end)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        # Somebody else's cancellation comes first.
        if self._is_over and self._task.uncancel() <= self._cancellations and kind is asyncio.CancelledError:
            raise TimeoutError from error

    def _end(self) -> None:
        self._is_over = True
        self._task.cancel()
