"""The current run of a deployment by its name, as the verbs ask for it: does it run, where, does it serve."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pdserve.errors import RecipeError, StateError
from pdserve.plan.model import Plan
from pdserve.plan.node import Srun
from pdserve.plan.running import RunningProcesses
from pdserve.recipe.load.loader import load_recipe
from pdserve.run.directory import RunDir, find, has_living_launcher, phase_now
from pdserve.run.state import DeploymentState
from pdserve.system.host import is_here, is_named_here

if TYPE_CHECKING:
    from pdserve.bench.run import ServingDeployment


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


def find_serving(
    root: Path, name: str | None, verb: str, *, phases: Sequence[str] = ("ready", "degraded")
) -> tuple[RunDir, DeploymentState, Plan]:
    """Find a deployment that serves, with its state and plan. Raises StateError when it is in none of these phases, and
    on a machine that does not have its key."""
    run = find(root, name)
    state, plan = run.read_state(), run.read_plan()
    if (phase := phase_now(run, state)) not in phases:
        raise StateError(
            f"{state.name} is not {' or '.join(phases)} ({phase})",
            where=str(run.path),
            cause=f"pdserve {verb} asks its engines through its proxy",
            todo=f"pdserve status {state.name} shows what is missing; pdserve up starts it",
        )
    if not (is_here(state.host, state.place) or is_named_here(state.host)):
        raise StateError(
            f"{state.name} has its key on {state.host}, and pdserve {verb} needs it",
            todo=f"run it there: srun --overlap --jobid=JOB --nodelist={state.host} pdserve {verb}, or by ssh",
        )
    return run, state, plan


def serving(root: Path, name: str | None, verb: str) -> ServingDeployment:
    """Return a deployment that is ready, to be measured, with its state, plan and key. Raises StateError."""
    from pdserve.bench.run import ServingDeployment
    from pdserve.operations.size import planned_numbers

    run, state, plan = find_serving(root, name, verb, phases=("ready",))
    return ServingDeployment(run, state, plan, run.read_key(), planned_numbers(run.recipe))
