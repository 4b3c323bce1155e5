"""Signals that a process sends itself at an exact call, where no other process could hit it reliably."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

_AT_A_CALL = """
import os, sys
steps = {steps!r}
def look(frame, event, _):
    file, function = steps[0]
    code = frame.f_code
    if event != (last if len(steps) == 1 else "call"):
        return
    if code.co_name == function and code.co_filename.endswith(file):
        del steps[0]
        if not steps:
            sys.setprofile(None)
            os.kill(os.getpid(), {signum})
last = {last!r}
if {word!r} in sys.orig_argv:
    sys.setprofile(look)
"""

Call = tuple[str, str]
"""The end of a source file's path, and a function in it."""


def at_a_call(word: str, *steps: Call, signum: signal.Signals = signal.SIGINT, late: bool = False) -> str:
    """A script for `strike`: a command with this word in its argv gets the signal as it begins the last of these calls,
    after the others, or `late`: has done what it does."""
    return _AT_A_CALL.format(word=word, steps=list(steps), last="return" if late else "call", signum=int(signum))


def strike(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every Python that starts from now on runs `script` first."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(script)
    monkeypatch.setenv("PYTHONPATH", str(folder))
