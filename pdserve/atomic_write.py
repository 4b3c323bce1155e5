"""Replace a file in one step: a reader, and a crash, see the old text or the new one, never a part of it."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path


def replace_text(file: Path, text: str) -> None:
    """Write `text` beside `file` under a hidden name of this process alone, then rename it into place.

    Raises OSError, also where the folder is gone; the old text stands then, and nothing is left beside it."""
    temporary = file.with_name(f".{file.name}.{socket.gethostname()}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.rename(file)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
