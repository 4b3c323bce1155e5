"""The running deployment that a proof is about."""

from __future__ import annotations

import os

from pdserve.errors import StateError
from pdserve.operations.serving import check_host
from pdserve.plan.model import Plan
from pdserve.run.directory import RunDir, find, home, lives
from pdserve.run.state import DeploymentState


def serving(name: str | None, verb: str) -> tuple[RunDir, DeploymentState, Plan]:
    """Raises StateError when it does not serve, or not with its launcher on this machine."""
    run_dir = find(home(os.environ), name)
    state, plan = run_dir.read_state(), run_dir.read_plan()
    if not lives(run_dir, state) or state.phase not in ("ready", "degraded"):
        raise StateError(f"{state.name} is not serving ({state.phase})", todo="pdserve up, or pdserve status")
    check_host(state, f"{state.name} is proven", verb)
    return run_dir, state, plan
