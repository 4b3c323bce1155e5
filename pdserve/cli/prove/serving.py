"""The running deployment that a proof is about."""

from __future__ import annotations

import os

from pdserve.errors import StateError
from pdserve.plan.model import Plan
from pdserve.run.directory import RunDir, find, home, lives
from pdserve.run.state import DeploymentState
from pdserve.system.host import is_here, is_named_here


def serving(name: str | None, verb: str) -> tuple[RunDir, DeploymentState, Plan]:
    """Raises StateError when it does not serve, or not with its launcher on this machine."""
    run_dir = find(home(os.environ), name)
    state, plan = run_dir.read_state(), run_dir.read_plan()
    if not lives(run_dir, state) or state.phase not in ("ready", "degraded"):
        raise StateError(f"{state.name} is not serving ({state.phase})", todo="pdserve up, or pdserve status")
    if not (is_here(state.host, state.place) or is_named_here(state.host)):
        raise StateError(
            f"{state.name} is proven from {state.host}, where its key is",
            todo=f"run it there: srun --overlap --jobid=JOB --nodelist={state.host} pdserve {verb}, or by ssh",
        )
    return run_dir, state, plan
