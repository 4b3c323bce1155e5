"""Clients that leave while nothing is read from them: an event loop notices that only where it reads."""

from __future__ import annotations

import asyncio
import contextlib
import select
from collections.abc import Callable

_MOST = 256
"""Told of in one turn of the loop."""


class HangUps:
    """Watches for clients that leave. A second epoll, which the loop watches as one more file: it reports no data."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._epoll = select.epoll()
        self._gone: dict[int, Callable[[], None]] = {}
        loop.add_reader(self._epoll.fileno(), self._heard)

    def watch(self, descriptor: int, gone: Callable[[], None]) -> None:
        """`gone` is called once, when the other end has closed or reset the connection."""
        with contextlib.suppress(FileExistsError):
            self._epoll.register(descriptor, select.EPOLLRDHUP)
        self._gone[descriptor] = gone

    def forget(self, descriptor: int, gone: Callable[[], None]) -> None:
        """No more of this one. Its descriptor may be closed, and even be another one's by now."""
        if self._gone.get(descriptor) == gone:
            del self._gone[descriptor]
            with contextlib.suppress(OSError, ValueError):
                self._epoll.unregister(descriptor)

    def close(self) -> None:
        self._loop.remove_reader(self._epoll.fileno())
        self._epoll.close()

    def _heard(self) -> None:
        for descriptor, _ in self._epoll.poll(0, _MOST):
            gone = self._gone.get(descriptor)
            if gone is not None:
                self.forget(descriptor, gone)
                gone()
            else:
                with contextlib.suppress(OSError, ValueError):
                    self._epoll.unregister(descriptor)
