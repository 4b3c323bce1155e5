"""Keeps what a start of a deployment has left, because old runs are removed after a while."""

from __future__ import annotations

import shutil
from pathlib import Path

from pdserve.errors import MAKE_ROOM, StateError
from pdserve.logs.rotation import earlier
from pdserve.run.directory import RunDir


def keep_start(run: RunDir, starts: Path) -> None:
    """Recipe, plan, versions, history, failure and logs; no key is among them. Raises StateError."""
    there = starts / run.run_id
    files = (run.recipe, run.plan, run.versions, run.state, run.events, earlier(run.events), run.failure)
    try:
        there.mkdir(parents=True, exist_ok=True, mode=0o700)
        for file in files:
            if file.exists():
                shutil.copy2(file, there / file.name)
        if run.logs.exists():
            shutil.copytree(run.logs, there / run.logs.name, dirs_exist_ok=True)
    except OSError as error:
        raise StateError(
            "the logs of a start cannot be kept",
            where=str(there),
            cause=error.strerror or str(error),
            todo=MAKE_ROOM,
        ) from error
