"""The current run of a deployment by its name, as the verbs ask for it."""

from __future__ import annotations

import os
from pathlib import Path

from pdserve.errors import RecipeError, StateError
from pdserve.plan.model import Plan
from pdserve.plan.running import Running
from pdserve.recipe.load.loader import load_recipe
from pdserve.run.directory import RunDir, find, lives


def running(root: Path, name: str) -> RunDir | None:
    """The run of that name whose launcher lives, if there is one. Raises NotOursError."""
    try:
        run = find(root, name)
        return run if lives(run, run.read_state()) else None
    except StateError:
        return None


def last_run(root: Path, name: str) -> tuple[RunDir, Plan] | None:
    """The last run of that name and its plan, if it can be read. Raises NotOursError."""
    try:
        run = find(root, name)
        return run, run.read_plan()
    except StateError:
        return None


def places(run: RunDir) -> Running:
    """Where the processes of a run are, for a plan that leaves them there. Raises StateError and NotOursError."""
    plan = run.read_plan()
    try:
        return Running(plan, load_recipe(run.recipe, environ=os.environ).recipe.ports)
    except RecipeError:  # of another version, or not there
        return Running(plan)
