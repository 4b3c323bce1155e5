"""The writing end of a pipe or socket that must never block its event loop.

asyncio's own transport for writing watches the descriptor for reading too and takes anything readable for a closed
peer. An agent behind sshd has ONE socket for stdin and stdout, on which orders are readable all the time.
"""

from __future__ import annotations

import asyncio
import os


class Outlet:
    """Writes what it is given, in order; what the other side does not take yet is kept. Belongs to one event loop."""

    def __init__(self, descriptor: int) -> None:
        """`descriptor` stays the caller's to close, after `close`."""
        os.set_blocking(descriptor, False)
        self._descriptor = descriptor
        self._loop = asyncio.get_running_loop()
        self._waiting = bytearray()
        self._open = True
        self._empty = asyncio.Event()
        self._empty.set()

    def write(self, data: bytes) -> None:
        """Sends, now or as soon as the other side reads. A peer that has gone is not an error here."""
        if not self._open:
            return
        self._waiting += data
        if self._empty.is_set():
            self._empty.clear()
            self._loop.add_writer(self._descriptor, self._flush)
            self._flush()

    def _flush(self) -> None:
        try:
            while self._waiting:
                del self._waiting[: os.write(self._descriptor, self._waiting)]
        except BlockingIOError:
            return
        except OSError:
            self.close()
            return
        self._idle()

    def _idle(self) -> None:
        if not self._empty.is_set():
            self._loop.remove_writer(self._descriptor)
            self._empty.set()

    async def sent(self) -> None:
        """Returns once everything has been taken by the kernel, or the peer has gone."""
        await self._empty.wait()

    def close(self) -> None:
        """Drops what is waiting and writes nothing more."""
        self._open = False
        self._waiting.clear()
        self._idle()
