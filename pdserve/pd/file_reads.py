"""Files that are read again while the proxy serves: whatever stands at their paths by then, nothing may wait for it.

A device or a pipe would never end, and a file system of the network may not answer for minutes.
"""

from __future__ import annotations

import asyncio
import errno
import os
import stat
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from pdserve.time_limit import time_limit

T = TypeVar("T")
READ_SECONDS = 5.0
_MOST_BYTES = 1 << 24


def read_regular(path: Path) -> bytes:
    """Return the content of a regular file of up to 16 MiB. Raises OSError when the file cannot be read, or is none."""
    # Without O_NONBLOCK opening a pipe waits for who writes to it.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            data = file.read(_MOST_BYTES + 1)
    finally:
        os.close(descriptor)
    if len(data) > _MOST_BYTES:
        raise OSError(errno.EFBIG, "larger than 16 MiB", str(path))
    return data


class FileReads:
    """Reads beside the event loop, one after the other. Not in asyncio's own threads: the end of its loop waits for
    them, and one may hang."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "file-reads")

    async def run(self, read: Callable[[], T]) -> T:
        """Return what `read` gives, or raise what it raises. Raises TimeoutError when it takes longer than
        READ_SECONDS, or when the call before is not over. What has begun goes on, and what it gives is dropped."""
        async with time_limit(READ_SECONDS):
            return await asyncio.get_running_loop().run_in_executor(self._thread, read)
