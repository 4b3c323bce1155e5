"""Steps of a loop that must not end with one of them: what a step raises is logged, and the next one is taken."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import traceback
from collections.abc import Callable


class UnendingLoop:
    """Logs to stderr, which is the log of a detached launcher: the same trouble once, not at each round."""

    def __init__(self) -> None:
        self._text = ""

    async def step(self, work: Callable[[], None]) -> None:
        """Does it. Whatever it raises ends only this step."""

        async def done() -> None:
            work()

        [error] = await asyncio.gather(done(), return_exceptions=True)
        if error is not None and repr(error) != self._text:
            self._text = repr(error)
            with contextlib.suppress(OSError):  # nobody reads it any more
                traceback.print_exception(error, file=sys.stderr)
