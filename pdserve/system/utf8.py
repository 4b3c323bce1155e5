"""Text is UTF-8 wherever we run, as it is in recipes, in JSON and in the output of engines."""

from __future__ import annotations

import os
import sys

_MODE = "PYTHONUTF8"


def ensure() -> None:
    """Starts this program anew in Python's UTF-8 mode where the locale means another encoding, which would be that of
    file names, arguments, pipes and files. What we start inherits the mode. (Can go when no Python has another one.)"""
    if sys.getfilesystemencoding() != "utf-8" and os.environ.get(_MODE) != "1":
        os.environ[_MODE] = "1"
        # The same process, with its pipes.
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606
