"""Replace a file in one step: a reader, and a crash, see the old text or the new one, never a part of it."""

from __future__ import annotations

import os
import socket
from pathlib import Path


def replace_text(file: Path, text: str) -> None:
    """Write `text` beside `file` under a hidden name of this process alone, then rename it into place.

    Raises OSError, also where the folder is gone."""
    temporary = file.with_name(f".{file.name}.{socket.gethostname()}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    temporary.rename(file)
