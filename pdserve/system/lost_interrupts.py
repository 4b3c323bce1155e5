"""A Ctrl-C during a destructor, or a callback of a weak reference, is not lost.

Python's own handler raises KeyboardInterrupt wherever the main thread is. No exception leaves a destructor: the
interpreter prints "Exception ignored in" and goes on (sys.unraisablehook), so that the command runs on as if there had
been no Ctrl-C. `subprocess.Popen.__del__` runs right after a detached start has shown that it serves, which is when a
user or a script acts.
"""

from __future__ import annotations

import _thread
import signal
import sys
import threading
import time
from types import CodeType
from typing import Any

_SECONDS = 0.01
"""A destructor is over by then. If not, it comes again."""


def repeat_lost_interrupts() -> None:
    """From now on a KeyboardInterrupt that the interpreter drops is raised in the main thread a moment later. For as
    long as Python's own handler of SIGINT, or one that stops what runs, is set."""
    printed = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        if unraisable.exc_type is KeyboardInterrupt:
            # Not threading.Thread, whose start waits here until the thread runs: on a busy machine for longer.
            _thread.start_new_thread(_interrupt, (hook.__code__,))
        else:
            printed(unraisable)

    sys.unraisablehook = hook


def _interrupt(hook: CodeType) -> None:
    """What is raised inside of the hook is dropped too."""
    main = threading.main_thread().ident
    assert main is not None
    time.sleep(_SECONDS)
    while _runs(hook, main):
        time.sleep(_SECONDS)
    # To that thread: a system call in which it waits ends only by a signal of its own. `interruptible` makes TERM and
    # HUP a KeyboardInterrupt too, and SIGINT may be ignored (a script's `&`).
    signum = signal.SIGTERM if signal.getsignal(signal.SIGINT) is signal.SIG_IGN else signal.SIGINT
    signal.pthread_kill(main, signum)


def _runs(code: CodeType, thread: int) -> bool:
    frame = sys._current_frames().get(thread)
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame is not None
