"""Numbers that several proxy processes share, and the lock around changing them.

One process uses a plain array and no lock. Several map one file; a number that only one process writes (its own
requests in flight) may be read by all without the lock.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import threading
from array import array
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType

LAYOUT = 4
"""Of the numbers that the modules of the proxy take. Raise it when one of them takes more, fewer or others: processes
of two programs may share a file only where each finds the same in it."""
LOOK_SECONDS = 0.01
"""Between two looks at the others' numbers, while something waits for one of them to change: there is no event between
processes, and one for each place that becomes free would cost more than the looks."""
APART_SECONDS = 0.1
"""By so much may overtake each other what waits in different processes. In its exact order nearly every place would
change the process, and be empty until that looks: of what takes a short time most of the places."""
HEARD_SECONDS = 0.25
"""A process that waits and has not looked for so long has died or hangs: nothing waits for it."""
_BYTES = 8
_MAP_FIXED = 0x10
"""Of Linux; the module mmap has no name for it."""


class Numbers:
    """`size` doubles, all zero at first, as `cells`; `lock` makes several of them change together."""

    def __init__(
        self, cells: memoryview[float], lock: AbstractContextManager[object], process: int, processes: int
    ) -> None:
        self.cells = cells
        self.lock = lock
        self.process = process
        """Which of `processes` this one is."""
        self.processes = processes
        self._taken = 0
        self._mapped: tuple[mmap.mmap, int] | None = None

    def detach(self) -> None:
        """Another process has our index from now on: what we still count is seen by nobody else, and what the others
        count shows here as far as we have not counted beside it. OSError."""
        if self._mapped is not None:
            _make_private(*self._mapped)

    def take(self, count: int) -> memoryview[float]:
        """The next `count` cells. Every process must take the same in the same order. ValueError: none are left."""
        if self._taken + count > len(self.cells):
            raise ValueError(f"{self._taken + count} shared numbers are wanted, there are {len(self.cells)}")
        self._taken += count
        return self.cells[self._taken - count : self._taken]


def private_numbers(size: int) -> Numbers:
    """The numbers of a proxy that is one process."""
    cells = memoryview(array("d", bytes(size * _BYTES))).cast("B").cast("d")
    return Numbers(cells, threading.Lock(), 0, 1)


def shared_numbers(path: Path, size: int, *, process: int, processes: int) -> Numbers:
    """The numbers in the file at `path`, which must exist, as the process with that index sees them."""
    with path.open("r+b") as file:
        if os.fstat(file.fileno()).st_size < size * _BYTES:  # one that others have mapped is never cut: SIGBUS
            file.truncate(size * _BYTES)
        mapped = mmap.mmap(file.fileno(), size * _BYTES)
    # A descriptor of its own, never closed: closing any other of this file would drop the lock.
    descriptor = os.open(path, os.O_RDWR)
    numbers = Numbers(memoryview(mapped).cast("d"), _FileLock(descriptor), process, processes)
    numbers._mapped = mapped, descriptor
    return numbers


def _make_private(mapped: mmap.mmap, descriptor: int) -> None:
    """Map the same content at the same address, which others hold. What is written from now on stays in this
    process."""
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
    protection, how = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | _MAP_FIXED
    if library.mmap(address, len(mapped), protection, how, descriptor, 0) != address:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


class _FileLock:
    """Excludes other processes, not other code of this one; the kernel frees it when its holder dies."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def __enter__(self) -> None:
        fcntl.lockf(self._fd, fcntl.LOCK_EX)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        fcntl.lockf(self._fd, fcntl.LOCK_UN)
