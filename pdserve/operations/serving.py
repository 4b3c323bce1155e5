"""A deployment that serves, for a verb that needs its key."""

from __future__ import annotations

from pathlib import Path

from pdserve.bench.run import ServingDeployment
from pdserve.errors import StateError
from pdserve.operations.size import planned_numbers
from pdserve.run.directory import find, phase_now
from pdserve.run.state import DeploymentState
from pdserve.system.host import is_here, is_named_here


def serving(root: Path, name: str | None, verb: str) -> ServingDeployment:
    """Return a deployment that is ready, with its state, plan and key. Raises StateError when it is not ready: figures
    of a degraded deployment are of another. It is also raised on a machine that does not have the deployment's key."""
    run = find(root, name)
    state, plan = run.read_state(), run.read_plan()
    if (phase := phase_now(run, state)) != "ready":
        raise StateError(
            f"{state.name} is not ready ({phase})",
            where=str(run.path),
            cause="only a deployment with all of its processes can be measured",
            todo=f"pdserve status {state.name} shows what is missing; pdserve up starts it",
        )
    check_host(state, f"{state.name} is measured", verb)
    return ServingDeployment(run, state, plan, run.read_key(), planned_numbers(run.recipe))


def check_host(state: DeploymentState, what: str, verb: str) -> None:
    """Check that this machine has the key of the deployment. Raises StateError."""
    if not (is_here(state.host, state.place) or is_named_here(state.host)):
        raise StateError(
            f"{what} from {state.host}, where its key is",
            todo=f"run it there: srun --overlap --jobid=JOB --nodelist={state.host} pdserve {verb}, or by ssh",
        )
