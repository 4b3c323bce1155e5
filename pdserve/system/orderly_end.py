"""A TERM or a closed terminal ends a verb in order: what it has started is stopped, and what it left is removed."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any, TypeVar

_T = TypeVar("_T")
SIGNALS = (signal.SIGTERM, signal.SIGHUP)
_EXIT = 128
"""Added to a signal: the code with which shells report an end by it."""


def run_to_its_end(main: Coroutine[Any, Any, _T]) -> _T:
    """asyncio.run, which cancels `main` at a Ctrl-C and lets it clean up, does the same at TERM and HUP.

    Raises SystemExit with 128 + the signal after that. A HUP that is ignored from the start (nohup) stays ignored.
    """
    came: list[signal.Signals] = []

    async def guarded() -> _T:
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None

        def end(signum: signal.Signals) -> None:
            # The first one only: a second cancellation would interrupt the cleaning up.
            if not came:
                task.cancel()
            came.append(signum)

        for signum in SIGNALS:
            if signal.getsignal(signum) is not signal.SIG_IGN:
                loop.add_signal_handler(signum, end, signum)
        return await main

    try:
        return asyncio.run(guarded())
    except asyncio.CancelledError:
        if not came:
            raise
        raise SystemExit(_EXIT + came[0]) from None
