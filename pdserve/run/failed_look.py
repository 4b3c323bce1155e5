"""The folder of an `up` or `preflight` that was refused before anything was started.

A look at other machines needs the folder of a run: probes log into it, and all nodes must see it. It goes when the
start is refused or interrupted. Only where a node could not be looked at it stays, because the error names a log in it:
until the next look at the same deployment, or `list --prune`.
"""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

from pdserve.run.directory import RunDir
from pdserve.run.named_runs import named_runs


def is_failed_look(run: RunDir) -> bool:
    """Whether nothing of it was ever started, and nothing will be."""
    return run.failure.is_file() and not any(file.exists() for file in (run.recipe, run.plan, run.state))


def keep_failed_look(run: RunDir, report: str) -> None:
    """Has `discard` leave it. Without room for the report it goes: the error has the end of each log too."""
    with contextlib.suppress(OSError):
        run.write(run.failure, report)


def discard(run: RunDir) -> None:
    """Removes the folder of a run in which nothing was started, unless it is kept; and that of its deployment, if it
    is the only one. What cannot be removed stays: the error of the start is the one to show."""
    if is_failed_look(run):
        return
    shutil.rmtree(run.path, ignore_errors=True)
    with contextlib.suppress(OSError):
        run.path.parent.rmdir()


def discard_earlier(deployment: Path) -> None:
    """The failed looks of a deployment, before the next one."""
    with contextlib.suppress(OSError):
        for path in named_runs(deployment):
            if is_failed_look(RunDir(path)):
                shutil.rmtree(path, ignore_errors=True)
