"""The signals that stop a deployment, or a verb that has a child: those of a terminal, where they are heard, and a
TERM."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

_T = TypeVar("_T")
_SIGNALLED = 128
"""Added to a signal: the code with which shells report an end by it."""


def stop_signals() -> list[signal.Signals]:
    """Without those of a terminal that are ignored from the start, as under nohup. A TERM always counts: pdserve itself
    sends it."""
    of_terminal = (signal.SIGINT, signal.SIGHUP)
    return [signal.SIGTERM, *(each for each in of_terminal if signal.getsignal(each) is not signal.SIG_IGN)]


def hear_stops(asked: Callable[[signal.Signals], None]) -> None:
    """From now on `asked` is called with each of them, in the event loop that runs."""
    loop = asyncio.get_running_loop()
    for signum in stop_signals():
        loop.add_signal_handler(signum, asked, signum)


def run_to_its_end(main: Coroutine[Any, Any, _T]) -> _T:
    """asyncio.run, in which the first of them cancels `main`, so that it stops what it has started.

    Then raises KeyboardInterrupt after a Ctrl-C, else SystemExit with 128 + the signal. A second one does nothing: it
    would interrupt the cleaning up.
    """
    came: list[signal.Signals] = []

    async def heard() -> _T:
        task = asyncio.current_task()
        assert task is not None

        def end(signum: signal.Signals) -> None:
            if not came:
                task.cancel()
            came.append(signum)

        hear_stops(end)
        return await main

    try:
        return asyncio.run(heard())
    except asyncio.CancelledError:
        if not came:
            raise
        if came[0] is signal.SIGINT:
            raise KeyboardInterrupt from None
        raise SystemExit(_SIGNALLED + came[0]) from None
