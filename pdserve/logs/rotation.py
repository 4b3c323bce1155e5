"""Logs of bounded size: NAME.log, then NAME.log.1 (the last of what was cut off) to NAME.log.<keep>.

The writer has the file open, appends, and is never asked: nothing stands between an engine and its log that could die
and take lines with it. So a full log is copied and cut (copytruncate), not renamed, which its writer would follow.
Lines that are written between the last read of the copy and the cut, microseconds, are lost; that is the price.

Where no copy fits, a log that is left alone would keep the disk full for good. There its end is moved over its
beginning, which needs no free byte, and the rest is lost; the first line of the log has how much.

`keep_bounded` keeps the logs of our own processes as small as the agents keep those of the engines: of a detached
launcher, of the agents (stderr of them, or of their ssh or srun, is written here) and of the node probes.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pdserve.recipe.sections import Logs

NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_STEP_BYTES = 1 << 20
_KEPT_IN_PLACE = 8 << 20
"""Of a log that is cut in place: few enough to be moved at once, without a pause in which its reader is led astray."""
_LOST = "pdserve: there was no room for a copy of this log when it was cut: {} bytes before this line are lost\n"
_LOST_LINE = re.compile(re.escape(_LOST).replace(r"\{\}", r"(\d+)").encode())


@dataclass(frozen=True)
class LostPart:
    """The part that a log has lost which was cut in place, and the line that reports it."""

    lost: int
    """Bytes from its beginning."""
    line: int
    """Bytes of that line, with which it begins now."""

    def now_at(self, offset: int) -> int:
        """Return where a byte stands that stood at `offset` before the cut; 0 if it is gone."""
        return offset - self.lost + self.line if offset >= self.lost else 0


def rotated_log(log: Path, number: int = 1) -> Path:
    """Return the file of what was cut off; 1 is the latest."""
    return log.with_name(f"{log.name}.{number}")


async def cut(log: Path, limit: int, keep: int) -> tuple[LostPart, OSError] | None:
    """Cuts a log of which at most `limit` bytes are wanted. Where there is no room for a copy, in place: what it has
    lost then, and why. Nothing is awaited after the cut, so that the caller can correct what it knows of the log
    before anybody reads. Raises OSError."""
    try:
        await asyncio.to_thread(begin, log, keep)
        finish(log, keep)
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        return cut_in_place(log, limit), error
    return None


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


def cut_in_place(log: Path, limit: int) -> LostPart:
    """Keeps the end of a log that is larger than `limit`, at most half as much, from the beginning of a line on. Raises
    OSError: a file system that never writes in place (copy on write) may have no room even for this."""
    rotated_log(log, 0).unlink(missing_ok=True)  # of a copy that was given up
    with log.open("r+b", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        lost = size - min(size, limit // 2, _KEPT_IN_PLACE)
        lost += os.pread(file.fileno(), _STEP_BYTES, lost).find(b"\n") + 1
        line = _LOST.format(lost).encode()
        cut = LostPart(lost, len(line) if len(line) <= lost else 0)
        _write_at(file.fileno(), line[: cut.line], 0)
        source, target = lost, cut.line
        while data := os.pread(file.fileno(), _STEP_BYTES, source):
            _write_at(file.fileno(), data, target)
            source, target = source + len(data), target + len(data)
        file.truncate(target)
    return cut


def lost_of(log: Path) -> LostPart | None:
    """Return what a log has lost when it was cut in place, by its first line; None for one that was copied before."""
    try:
        with log.open("rb") as file:
            head = file.read(2 * len(_LOST))
    except OSError:
        return None
    match = _LOST_LINE.match(head)
    return None if match is None else LostPart(int(match[1]), match.end())


def _write_at(descriptor: int, data: bytes, offset: int) -> None:
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written


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
            await cut(log, limit, settings.keep)


def _larger(folder: Path, limit: int) -> list[Path]:
    logs = (log for pattern in _PATTERNS for log in folder.glob(pattern))
    return [log for log in logs if log.stat().st_size > limit]
