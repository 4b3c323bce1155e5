"""`pdserve preflight`: what every node has and lacks for a recipe. Starts nothing."""

from __future__ import annotations

import os

from pdserve.errors import StateError
from pdserve.operations.current_run import running
from pdserve.operations.look import look_once
from pdserve.operations.size import find_crossings
from pdserve.operations.where import Where
from pdserve.preflight.finding import Finding, of_plan
from pdserve.preflight.nodes.container_stage import Report
from pdserve.recipe.load.loader import LoadedRecipe
from pdserve.run.directory import home


def preflight(loaded: LoadedRecipe, there: Where, report: Report) -> tuple[Finding, ...]:
    """All findings. `report` gets lines while an image is fetched.

    Raises StateError where the deployment runs: its ports and its memory are its own, and every check would blame it;
    and as `look`."""
    name = loaded.recipe.name
    if running(home(os.environ), name) is not None:
        raise StateError(
            f"{name} is running",
            cause="preflight looks for what a start from nothing needs, and the deployment has it",
            todo=f"pdserve status {name}; pdserve up RECIPE checks what it would change",
        )
    seen = look_once(loaded, there.machines, report)
    return (*of_plan(seen.planned.plan), *find_crossings(seen.planned), *seen.findings)
