"""Logs of bounded size: NAME.log, then NAME.log.1 (the last of what was cut off) to NAME.log.<keep>.

The writer has the file open, appends, and is never asked: nothing stands between an engine and its log that could die
and take lines with it. So a full log is copied and cut (copytruncate), not renamed, which its writer would follow.
Lines that are written between the last read of the copy and the cut, microseconds, are lost; that is the price.

Where no copy fits, a log that is left alone would keep the disk full for good. There what it has is lost, with its
older copies.

`keep_bounded` keeps the logs of our own processes as small as the agents keep those of the engines: of a detached
launcher, of the agents (stderr of them, or of their ssh or srun, is written here) and of the node probes.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import sys
from collections.abc import Callable
from pathlib import Path

from pdserve.recipe.sections import Logs

NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_STEP_BYTES = 1 << 20


def rotated_log(log: Path, number: int = 1) -> Path:
    """Return the file of what was cut off; 1 is the latest."""
    return log.with_name(f"{log.name}.{number}")


async def cut(log: Path, keep: int) -> tuple[int, OSError] | None:
    """Cuts a log. Where there is no room for a copy: the bytes that are lost, and why. Nothing is awaited after the
    cut, so that the caller can correct what it knows of the log before anybody reads. Raises OSError."""
    try:
        await asyncio.to_thread(begin, log, keep)
        finish(log, keep)
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        return drop(log, keep), error
    return None


def drop(log: Path, keep: int) -> int:
    """Empties a log and removes its copies: a reader would take an older one for what was cut off. Returns the bytes
    that the log had. Raises OSError."""
    for number in range(keep + 1):
        rotated_log(log, number).unlink(missing_ok=True)
    lost = log.stat().st_size
    os.truncate(log, 0)
    return lost


def begin(log: Path, keep: int) -> None:
    """Copies a log, however long that takes; nothing of it changes. Raises OSError (a full disk)."""
    if not keep:
        return
    rotated_log(log, keep).unlink(
        missing_ok=True
    )  # before, not after: the disk never holds one more than was asked for
    try:
        _copy(log, rotated_log(log, 0), 0)
    except OSError:
        rotated_log(log, 0).unlink(missing_ok=True)
        raise


def finish(log: Path, keep: int) -> None:
    """Copies what came since `begin`, moves the copies on, and cuts the log. Raises OSError."""
    if keep:
        _copy(log, rotated_log(log, 0), rotated_log(log, 0).stat().st_size)
        for number in range(keep - 1, -1, -1):
            if rotated_log(log, number).exists():
                rotated_log(log, number).rename(rotated_log(log, number + 1))
    os.truncate(log, 0)


def _copy(source: Path, target: Path, offset: int) -> None:
    with source.open("rb") as reader, target.open("ab" if offset else "wb") as writer:
        reader.seek(offset)
        while data := reader.read(_STEP_BYTES):
            writer.write(data)


_PATTERNS = ("launcher.log", "agent@*.log", "probe@*.log")
_LOOK_SECONDS = 2.0
_AGAIN_SECONDS = 60.0
_MIB = 1 << 20


async def keep_bounded(folder: Path, settings: Callable[[], Logs]) -> None:
    """Cut each log of a folder whenever it is too large, until this is cancelled. `settings`: of the plan that holds
    then."""
    while True:
        await asyncio.sleep(_LOOK_SECONDS)
        try:
            await cut_large(folder, settings())
        except OSError as error:
            with contextlib.suppress(OSError):  # what is said is in one of these logs, on the same disk
                print(f"a log in {folder} cannot be cut: {error}", file=sys.stderr, flush=True)
            await asyncio.sleep(_AGAIN_SECONDS)


async def cut_large(folder: Path, settings: Logs) -> None:
    """Cut each log in the folder that is too large. Raises OSError."""
    if limit := settings.max_mib * _MIB:
        for log in _larger(folder, limit):
            await cut(log, settings.keep)


def _larger(folder: Path, limit: int) -> list[Path]:
    logs = (log for pattern in _PATTERNS for log in folder.glob(pattern))
    return [log for log in logs if log.stat().st_size > limit]
