"""Checks before anything starts, of each node and of all nodes together; the values of the plan's secrets."""

from __future__ import annotations

from collections.abc import Mapping

from pdserve.errors import PreflightError
from pdserve.plan.environment import ENGINE_KEY
from pdserve.plan.model import Plan


def resolve_secrets(plan: Plan, environ: Mapping[str, str], engine_key: str) -> dict[str, str]:
    """Return the values of all secrets that the plan names. Raises PreflightError naming those that are not set."""
    names = {name for process in plan.processes for name in process.env.secrets.values()} - {ENGINE_KEY}
    missing = sorted(name for name in names if not environ.get(name))
    if missing:
        raise PreflightError(
            f"the recipe uses secrets that are not set: {', '.join(missing)}",
            todo=f"export {missing[0]}=... before pdserve up; only its name is ever written down",
        )
    return {**{name: environ[name] for name in names}, ENGINE_KEY: engine_key}
