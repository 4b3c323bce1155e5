"""The signals that stop a deployment, or a verb that has a child: those of a terminal, where they are heard, and a
TERM.

Python's own handler raises KeyboardInterrupt wherever the main thread is, and that of asyncio is gone once its loop is
closed. What must not be cut in two (a process is started, its record is written) runs in `held_back`.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable, Coroutine, Iterator, Mapping
from typing import Any, TypeVar

_T = TypeVar("_T")
_SIGNALLED = 128
"""Added to a signal: the code with which shells report an end by it."""
_WAKE_BYTES = 4096

Asked = Callable[[signal.Signals], None]


def stop_signals() -> list[signal.Signals]:
    """Without those of a terminal that are ignored from the start, as under nohup. A TERM always counts: pdserve itself
    sends it."""
    of_terminal = (signal.SIGINT, signal.SIGHUP)
    return [signal.SIGTERM, *(each for each in of_terminal if signal.getsignal(each) is not signal.SIG_IGN)]


def interruptible() -> None:
    """From here on each of them is a Ctrl-C: for a command that has something to clear up, and no loop."""
    for signum in stop_signals():
        signal.signal(signum, signal.default_int_handler)


def ignore_stops() -> None:
    """From here on a Ctrl-C and a TERM do nothing: what the command was for is done, and its exit code must not deny
    that. A closed terminal still ends it."""
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """What comes meanwhile is kept for a loop that hears it (`hear_stops`). What no loop has heard is a
    KeyboardInterrupt at the end, unless the block raises an error, which has more to say.
    After it the signals have the handlers that they had before. Within another one it leaves all to that."""
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
        held.close()
        _give_back(before, held)
    if held.came:
        raise KeyboardInterrupt


def _give_back(handlers: Mapping[signal.Signals, Any], held: _Held) -> None:
    """All of them, also where one interrupts."""
    while True:
        try:
            for signum, handler in handlers.items():
                signal.signal(signum, handler)
            return
        except KeyboardInterrupt:
            held.came.append(signal.SIGINT)


class _Held:
    """A handler that keeps signals until a loop hears them."""

    def __init__(self) -> None:
        self.came: list[signal.Signals] = []
        self._asked: Asked | None = None
        self._close = contextlib.ExitStack()

    def __call__(self, signum: int, _: object) -> None:
        self.came.append(signal.Signals(signum))

    def hear(self, asked: Asked, loop: asyncio.AbstractEventLoop) -> None:
        # Not by loop.add_signal_handler: a loop that closes sets TERM and HUP to end this process at once. The
        # interpreter writes to the socket after it has noted the signal, so that the handler runs before `_pass_on`.
        assert self._asked is None, "one loop hears them"
        self._asked = asked
        reads, writes = socket.socketpair()
        self._close.callback(reads.close)
        self._close.callback(writes.close)
        for end in (reads, writes):
            end.setblocking(False)

        def woken() -> None:
            with contextlib.suppress(BlockingIOError):
                reads.recv(_WAKE_BYTES)
            self._pass_on()

        loop.add_reader(reads, woken)
        self._close.callback(lambda: loop.is_closed() or loop.remove_reader(reads))
        before = signal.set_wakeup_fd(writes.fileno(), warn_on_full_buffer=False)
        self._close.callback(signal.set_wakeup_fd, before)
        self._pass_on()

    def close(self) -> None:
        self._close.close()

    def _pass_on(self) -> None:
        assert self._asked is not None
        while self.came:
            self._asked(self.came.pop(0))


def hear_stops(asked: Asked) -> None:
    """Within `held_back`: `asked` is called with each signal that came, at once, and then with each that comes, in the
    event loop that runs."""
    _holder().hear(asked, asyncio.get_running_loop())


def _holder() -> _Held:
    held = signal.getsignal(signal.SIGTERM)
    assert isinstance(held, _Held), "signals are heard within `held_back`"
    return held


def run_to_its_end(main: Coroutine[Any, Any, _T]) -> _T:
    """asyncio.run, in which the first signal cancels `main`, so that it stops what it has started.

    Then raises KeyboardInterrupt after a Ctrl-C, else SystemExit with 128 + the signal, also where `main` had ended or
    failed by then. A second signal does nothing: it would interrupt the cleaning up.
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

    with held_back():
        try:
            return asyncio.run(heard())
        finally:
            if stops := [*came, *_holder().came]:
                raise _stop(stops[0])


def _stop(signum: signal.Signals) -> BaseException:
    return KeyboardInterrupt() if signum is signal.SIGINT else SystemExit(_SIGNALLED + signum)
