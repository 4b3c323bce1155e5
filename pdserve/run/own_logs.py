"""The logs of our own processes, kept as small as the agents keep those of the engines: of a detached launcher, of the
agents (stderr of them, or of their ssh or srun, is written here) and of the node probes.

Their writers append, and never ask: a log that was cut goes on at its new end.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable
from pathlib import Path

from pdserve.logs import rotation
from pdserve.recipe.sections import Logs

_PATTERNS = ("launcher.log", "agent@*.log", "probe@*.log")
_LOOK_SECONDS = 2.0
_AGAIN_SECONDS = 60.0
_MIB = 1 << 20


async def keep_bounded(folder: Path, settings: Callable[[], Logs]) -> None:
    """Cuts each of them in the folder whenever it is too large, until it is cancelled. `settings`: of the plan of
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
    """Once. Raises OSError."""
    if limit := settings.max_mib * _MIB:
        for log in _larger(folder, limit):
            await rotation.cut(log, limit, settings.keep)


def _larger(folder: Path, limit: int) -> list[Path]:
    logs = (log for pattern in _PATTERNS for log in folder.glob(pattern))
    return [log for log in logs if log.stat().st_size > limit]
