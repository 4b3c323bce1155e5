"""Wait until a name appears in a folder (inotify(7)), with a limit of time."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
from pathlib import Path

from pdserve.time_limit import time_limit

_IN_MOVED_TO, _IN_CREATE = 0x80, 0x100
_MANY_BYTES = 64 * 1024


class NewNames:
    """Watches one folder from now on, in the running event loop; `close` ends it. Where the user has no watch left
    (fs.inotify.max_user_instances) it only waits for the time."""

    def __init__(self, folder: Path) -> None:
        self._new = asyncio.Event()
        libc = ctypes.CDLL(None)
        self._fd: int = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self._fd >= 0:
            libc.inotify_add_watch(self._fd, os.fsencode(folder), _IN_CREATE | _IN_MOVED_TO)
            asyncio.get_running_loop().add_reader(self._fd, self._drain_events)

    def _drain_events(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._fd, _MANY_BYTES)
        self._new.set()

    async def wait(self, seconds: float) -> None:
        """Wait until a name has appeared since the last time, or for so many seconds."""
        with contextlib.suppress(TimeoutError):
            # Not wait_for, which Python 3.11 lets go on when it is cancelled at the moment at which it ends.
            async with time_limit(seconds):
                await self._new.wait()
        self._new.clear()

    def close(self) -> None:
        """Stop watching. A second call does nothing."""
        if self._fd >= 0:
            asyncio.get_running_loop().remove_reader(self._fd)
            os.close(self._fd)
