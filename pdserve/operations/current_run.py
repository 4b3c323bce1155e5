"""The current run of a deployment by its name, as the verbs ask for it."""

from __future__ import annotations

from pathlib import Path

from pdserve.errors import NotOursError, StateError
from pdserve.plan.model import Plan
from pdserve.run.directory import RunDir, find, lives


def running(root: Path, name: str) -> RunDir | None:
    """The run of that name whose launcher lives, if there is one. Raises NotOursError."""
    try:
        run = find(root, name)
        return run if lives(run, run.read_state()) else None
    except NotOursError:
        raise
    except StateError:
        return None


def last_run(root: Path, name: str) -> tuple[RunDir, Plan] | None:
    """The last run of that name and its plan, if it can be read. Raises NotOursError."""
    try:
        run = find(root, name)
        return run, run.read_plan()
    except NotOursError:
        raise
    except StateError:
        return None
