"""Calls into Linux that Python 3.11 has no functions for: mounts and namespaces."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

NEW_MOUNTS, NEW_NET = 0x00020000, 0x40000000
RECURSIVE, SLAVE = 0x4000, 0x80000

_libc = ctypes.CDLL(None, use_errno=True)


def mount(source: str, target: Path, kind: str = "", *, flags: int = 0, options: str = "") -> None:
    """mount(2); OSError says what was mounted where."""
    arguments = (source.encode(), os.fsencode(target), kind.encode() or None)
    if _libc.mount(*arguments, ctypes.c_ulong(flags), options.encode() or None):
        raise _error(f"mount {kind or hex(flags)} {source} on {target}")


def unshare(flags: int) -> None:
    """New namespaces for this process."""
    if _libc.unshare(flags):
        raise _error(f"unshare {flags:#x}")


def enter(namespace: Path, kind: int) -> None:
    """The calling thread goes into a namespace, which a file of /proc/PID/ns names."""
    with namespace.open() as file:
        if _libc.setns(file.fileno(), kind):
            raise _error(f"setns {namespace}")


def _error(what: str) -> OSError:
    code = ctypes.get_errno()
    return OSError(code, f"{what}: {os.strerror(code)}")
