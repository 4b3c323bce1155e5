"""The signals that stop a deployment, or a verb that has a child: those of a terminal, where they are heard, and a
TERM.

They have one of two handlers: Python's own, which raises KeyboardInterrupt wherever the main thread is, or, in
`hold_stops`, one that notes the signal for an event loop or for the end of the block. What must not be cut in two (a
process is started, its record is written) runs in that. A Ctrl-C can be lost all the same, as one that comes while the
interpreter frees an object, and has to be pressed again.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

_T = TypeVar("_T")
_SIGNALLED = 128
"""Added to a signal: the code with which shells report an end by it."""

Asked = Callable[[signal.Signals], None]


def stop_signals() -> list[signal.Signals]:
    """Return the signals that stop, without those of a terminal that are ignored from the start, as under nohup. A TERM
    always counts: pdserve itself sends it."""
    of_terminal = (signal.SIGINT, signal.SIGHUP)
    return [signal.SIGTERM, *(each for each in of_terminal if signal.getsignal(each) is not signal.SIG_IGN)]


def let_signals_interrupt() -> None:
    """Let each signal that stops be a Ctrl-C from here on, for a command that has something to clear up, and no
    loop."""
    for signum in stop_signals():
        signal.signal(signum, signal.default_int_handler)


@contextlib.contextmanager
def hold_stops() -> Iterator[None]:
    """Keep what comes meanwhile for a loop that hears it (`hear_stops`). What no loop has heard is a KeyboardInterrupt
    at the end, unless the block raises an error, which has more to say. After it the signals have the handlers that
    they had before. Within another one it leaves all to that."""
    if isinstance(signal.getsignal(signal.SIGTERM), _Held):
        yield
        return
    held = _Held()
    before: dict[signal.Signals, Any] = {}
    try:
        for signum in stop_signals():
            before[signum] = signal.getsignal(signum)
            signal.signal(signum, held)
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
    if held.came:
        raise KeyboardInterrupt


class _Held:
    """A handler that keeps signals until a loop hears them."""

    def __init__(self) -> None:
        self.came: list[signal.Signals] = []
        self._asked: Asked | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def __call__(self, signum: int, _: object) -> None:
        self.came.append(signal.Signals(signum))
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._pass_on)  # wakes it, as asyncio's own handler of SIGINT does

    def hear(self, asked: Asked, loop: asyncio.AbstractEventLoop) -> None:
        # Not by loop.add_signal_handler: a loop that closes sets TERM and HUP to end this process at once.
        assert self._asked is None, "one loop hears them"
        self._asked, self._loop = asked, loop
        self._pass_on()

    def _pass_on(self) -> None:
        assert self._asked is not None
        while self.came:
            self._asked(self.came.pop(0))


def hear_stops(asked: Asked) -> None:
    """Call `asked` with each signal that came, at once, and then with each that comes, in the event loop that runs.
    This is called within `hold_stops`."""
    held = signal.getsignal(signal.SIGTERM)
    assert isinstance(held, _Held), "signals are heard within `hold_stops`"
    held.hear(asked, asyncio.get_running_loop())


def run_to_its_end(main: Coroutine[Any, Any, _T]) -> _T:
    """Do asyncio.run, in which the first signal cancels `main`, so that it stops what it has started.

    Then raises KeyboardInterrupt after a Ctrl-C, else SystemExit with 128 + the signal, also where `main` had failed by
    then. A second signal does nothing: it would interrupt the cleaning up.
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

    with hold_stops():
        try:
            return asyncio.run(heard())
        finally:
            if came:
                raise KeyboardInterrupt if came[0] is signal.SIGINT else SystemExit(_SIGNALLED + came[0])
