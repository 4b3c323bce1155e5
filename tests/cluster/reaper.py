"""PID 1 of a namespace inherits every orphan in it and must collect it when it ends."""

from __future__ import annotations

import os
import signal
from types import FrameType


def wakeups() -> int:
    """A descriptor that becomes readable when a child has ended."""
    read_end, writing = os.pipe()
    os.set_blocking(read_end, False)
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing)
    signal.signal(signal.SIGCHLD, _note)
    return read_end


def _note(signum: int, frame: FrameType | None) -> None:
    """Only its being there matters: the number goes to the descriptor."""


def reap(woken: int) -> list[int]:
    """Collects all that have ended; their PIDs."""
    os.read(woken, 4096)
    ended: list[int] = []
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        ended.append(pid)
