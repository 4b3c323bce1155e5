"""Set how glibc's malloc treats the bodies of requests, which are most of what it is asked for here.

By itself it returns each block of more than 128 KiB to the system when that is freed, and gets it back page by page: a
fault for every 4 KiB of every body. It learns better from what is freed, but then up to 32 MiB, and keeps twice as much
for ever. A flood of bodies still leaves memory behind, when something else has got the end of the heap meanwhile: up to
`max_buffered_bytes`.
"""

from __future__ import annotations

import contextlib
import ctypes
from typing import Final

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_KEPT_BYTES: Final = 16 * 1024 * 1024
"""Of free memory at the end of the heap: as much as a few bodies of a megabyte take on their way."""
_LARGE_BYTES: Final = 4 * 1024 * 1024
"""Such blocks go back to the system as soon as they are freed."""


def keep_for_bodies() -> None:
    """Keep freed memory for the next bodies of this process, where malloc is glibc's."""
    _set(_M_TRIM_THRESHOLD, _KEPT_BYTES)
    _set(_M_MMAP_THRESHOLD, _LARGE_BYTES)


def return_from(size: int) -> None:
    """Have blocks of this many bytes or more go back to the system as soon as they are freed."""
    _set(_M_MMAP_THRESHOLD, size)


def _set(parameter: int, value: int) -> None:
    with contextlib.suppress(AttributeError):  # not glibc
        ctypes.CDLL(None).mallopt(parameter, value)
