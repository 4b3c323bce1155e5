"""`pdserve preflight`: what every node has and lacks for a recipe. Starts nothing."""

from __future__ import annotations

import os

from pdserve.errors import StateError
from pdserve.operations.current_run import find_running
from pdserve.operations.look import Destination, look
from pdserve.operations.size import find_crossings
from pdserve.preflight.fabric.paths import Wish, find_untried
from pdserve.preflight.finding import Finding, of_plan
from pdserve.preflight.nodes.container_stage import Report
from pdserve.recipe.load.loader import LoadedRecipe
from pdserve.run.directory import home


def preflight(
    loaded: LoadedRecipe, there: Destination, report: Report, *, fabric: bool = False, min_gbps: float | None = None
) -> tuple[Finding, ...]:
    """All findings. `report` gets lines while an image is fetched. `fabric`: also of transfers between the nodes,
    which must reach `min_gbps` (None: what the recipe has).

    Raises StateError where the deployment runs: its ports and its memory are its own, and every check would blame it;
    and as `look`."""
    name = loaded.recipe.name
    if find_running(home(os.environ), name) is not None:
        raise StateError(
            f"{name} is running",
            cause="preflight looks for what a start from nothing needs, and the deployment has it",
            todo=f"pdserve status {name}; pdserve up RECIPE checks what it would change",
        )
    recipe = loaded.recipe
    least = recipe.fabric.min_gbps if min_gbps is None else min_gbps
    wish = Wish(python=recipe.engine.python, min_gbps=least, rails=True) if fabric else None
    seen = look(loaded, there.machines, None, report=report, fabric=wish)
    plan = seen.planned.plan
    here_only = find_untried(plan) if fabric and there.machines is None else None
    return (*of_plan(plan), *find_crossings(seen.planned), *seen.findings, *([here_only] if here_only else []))
