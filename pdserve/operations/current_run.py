"""The current run of a deployment by its name, as the verbs ask for it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from pdserve.errors import RecipeError, StateError
from pdserve.plan.model import Plan
from pdserve.plan.node import Srun
from pdserve.plan.running import RunningProcesses
from pdserve.recipe.load.loader import load_recipe
from pdserve.run.directory import RunDir, find, has_living_launcher


def find_running(root: Path, name: str) -> RunDir | None:
    """Return the run of that name whose launcher lives, if there is one. Raises NotOursError."""
    try:
        run = find(root, name)
        return run if has_living_launcher(run, run.read_state()) else None
    except StateError:
        return None


def last_run(root: Path, name: str) -> tuple[RunDir, Plan] | None:
    """Return the last run of that name and its plan, if it can be read. Raises NotOursError."""
    try:
        run = find(root, name)
        return run, run.read_plan()
    except StateError:
        return None


def running_places(run: RunDir) -> RunningProcesses:
    """Return where the processes of a run are, for a plan that keeps them. Raises StateError and NotOursError."""
    plan = run.read_plan()
    try:
        return RunningProcesses(plan, load_recipe(run.recipe, environ=os.environ).recipe.ports)
    except RecipeError:  # of another version, or not there
        return RunningProcesses(plan)


def check_place(run: RunDir, nodes: Sequence[str], *, job: str | None) -> None:
    """Check that a running deployment is on these nodes and in this job: two jobs are two deployments. Raises
    StateError."""
    plan = run.read_plan()
    theirs = next((node.reach.job for node in plan.nodes if isinstance(node.reach, Srun)), None)
    there = [node.name for node in plan.nodes]
    if (theirs, sorted(there)) == (job, sorted(nodes)):
        return
    place = ", ".join(there) + (f" (job {theirs})" if theirs is not None else "")
    raise StateError(
        f"{plan.name} is running on {place}, and this is {', '.join(nodes)}" + (f" (job {job})" if job else ""),
        where=str(run.path),
        cause="a deployment is identified by its name, which the recipe gives",
        todo=f"another name for this one: --set name={plan.name}-2; or pdserve down {plan.name} first",
    )
