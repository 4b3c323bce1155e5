"""Logs of bounded size: NAME.log, then NAME.log.1 (the last of what was cut off) to NAME.log.<keep>.

The writer has the file open, appends, and is never asked: nothing stands between an engine and its log that could die
and take lines with it. So a full log is copied and cut (copytruncate), not renamed, which its writer would follow.
Lines that are written between the last read of the copy and the cut, microseconds, are lost; that is the price.
"""

from __future__ import annotations

import os
from pathlib import Path

_STEP_BYTES = 1 << 20


def earlier(log: Path, number: int = 1) -> Path:
    """Where what was cut off is; 1 is the latest."""
    return log.with_name(f"{log.name}.{number}")


def begin(log: Path, keep: int) -> None:
    """Copies a log, however long that takes; nothing of it changes. Raises OSError (a full disk)."""
    if not keep:
        return
    earlier(log, keep).unlink(missing_ok=True)  # before, not after: the disk never holds one more than was asked for
    try:
        _copy(log, earlier(log, 0), 0)
    except OSError:
        earlier(log, 0).unlink(missing_ok=True)
        raise


def finish(log: Path, keep: int) -> None:
    """Copies what came since `begin`, moves the copies on, and cuts the log. Raises OSError."""
    if keep:
        _copy(log, earlier(log, 0), earlier(log, 0).stat().st_size)
        for number in range(keep - 1, -1, -1):
            if earlier(log, number).exists():
                earlier(log, number).rename(earlier(log, number + 1))
    os.truncate(log, 0)


def _copy(source: Path, target: Path, offset: int) -> None:
    with source.open("rb") as reader, target.open("ab" if offset else "wb") as writer:
        reader.seek(offset)
        while data := reader.read(_STEP_BYTES):
            writer.write(data)
