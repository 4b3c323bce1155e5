"""The writing end of a pipe or socket that must never block its event loop.

asyncio's own transport for writing watches the descriptor for reading too and takes anything readable for a closed
peer. An agent behind sshd has ONE socket for stdin and stdout, on which orders are readable all the time.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

BEHIND_SECONDS = 5.0
"""A peer that takes nothing for so long is behind."""


class PipeWriter:
    """Writes what it is given, in order; what the other side does not take yet is kept. Belongs to one event loop."""

    def __init__(self, descriptor: int, on_empty: Callable[[], None] | None = None) -> None:
        """Begin with nothing to write. `descriptor` stays the caller's to close, after `close`. `on_empty`: called when
        the other side has taken what had to wait."""
        os.set_blocking(descriptor, False)
        self._descriptor = descriptor
        self._loop = asyncio.get_running_loop()
        self._waiting = bytearray()
        self._open = True
        self._on_empty = on_empty
        self._empty = asyncio.Event()
        self._empty.set()

    @property
    def waiting(self) -> int:
        """Return the bytes that the other side has not taken yet."""
        return len(self._waiting)

    def write(self, data: bytes) -> None:
        """Sends, now or as soon as the other side reads. A peer that has gone is not an error here."""
        if not self._open:
            return
        self._waiting += data
        if self._empty.is_set():
            self._empty.clear()
            self._loop.add_writer(self._descriptor, self._writable)
            self._flush()

    def _writable(self) -> None:
        self._flush()
        if self._open and self._empty.is_set() and self._on_empty is not None:
            self._on_empty()

    def _flush(self) -> None:
        try:
            while self._waiting:
                del self._waiting[: os.write(self._descriptor, self._waiting)]
        except BlockingIOError:
            return
        except OSError:
            self.close()
            return
        self._stop_writing()

    def _stop_writing(self) -> None:
        if not self._empty.is_set():
            self._loop.remove_writer(self._descriptor)
            self._empty.set()

    async def sent(self) -> None:
        """Wait until the kernel has taken everything, or the peer has gone."""
        await self._empty.wait()

    def close(self) -> None:
        """Drops what is waiting and writes nothing more."""
        self._open = False
        self._waiting.clear()
        self._stop_writing()


class NewestLines:
    """Lines to a reader that may pause: of those about one thing only the newest waits, and what waits
    is bounded. For states, which the newest line has in whole."""

    def __init__(self, descriptor: int, behind: Callable[[bool], None]) -> None:
        """Begin with nothing to write. `behind`: called with True when lines have waited for some seconds, with False
        when they have been taken. `descriptor` as for PipeWriter."""
        self._writer = PipeWriter(descriptor, self._pump)
        self._behind = behind
        self._lines: dict[str, bytes] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._reported_behind = False

    def write(self, about: str, line: bytes) -> None:
        """Send a line, in the place of an older one about the same that has not been sent yet."""
        self._lines.pop(about, None)
        self._lines[about] = line
        self._pump()

    def close(self) -> None:
        """Drops what is waiting and writes nothing more."""
        self._lines.clear()
        self._writer.close()
        self._caught_up()

    def _pump(self) -> None:
        while self._lines and not self._writer.waiting:
            about = next(iter(self._lines))
            self._writer.write(self._lines.pop(about))
        if not self._writer.waiting:
            self._caught_up()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(BEHIND_SECONDS, self._late)

    def _late(self) -> None:
        self._reported_behind = True
        self._behind(True)

    def _caught_up(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._reported_behind:
            self._reported_behind = False
            self._behind(False)
