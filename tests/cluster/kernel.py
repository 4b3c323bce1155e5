"""Calls into Linux that Python 3.11 has no functions for: mounts and namespaces."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

NEW_MOUNTS, NEW_UTS, NEW_PIDS, NEW_NET = 0x00020000, 0x04000000, 0x20000000, 0x40000000
BIND, MOVE, RECURSIVE, PRIVATE, SLAVE = 0x1000, 0x2000, 0x4000, 0x40000, 0x80000
_PR_SET_NAME = 15

_libc = ctypes.CDLL(None, use_errno=True)


def mount(source: str, target: Path, kind: str = "", *, flags: int = 0, options: str = "") -> None:
    """mount(2); OSError says what was mounted where."""
    target.mkdir(parents=True, exist_ok=True)
    arguments = (source.encode(), os.fsencode(target), kind.encode() or None)
    if _libc.mount(*arguments, ctypes.c_ulong(flags), options.encode() or None):
        raise _error(f"mount {kind or hex(flags)} {source} on {target}")


def unshare(flags: int) -> None:
    """New namespaces for this process; a new PID namespace starts with its next child."""
    if _libc.unshare(flags):
        raise _error(f"unshare {flags:#x}")


def enter(namespace: Path, kind: int) -> None:
    """The calling thread goes into a namespace, which a file of /proc/PID/ns or /run/netns names."""
    descriptor = os.open(namespace, os.O_RDONLY)
    try:
        if _libc.setns(descriptor, kind):
            raise _error(f"setns {namespace}")
    finally:
        os.close(descriptor)


def name_process(name: str) -> None:
    """Set what ps shows for a forked process that runs no program of its own; 15 characters."""
    _libc.prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)


def _error(what: str) -> OSError:
    code = ctypes.get_errno()
    return OSError(code, f"{what}: {os.strerror(code)}")
