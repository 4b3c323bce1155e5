"""The signals that stop a deployment: those of a terminal, where they are heard, and a TERM."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable


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
