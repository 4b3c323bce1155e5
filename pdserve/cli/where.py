"""Where a deployment goes: this machine, the nodes of the Slurm job around the command, or a cluster file's hosts."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pdserve.candidates import Candidates, in_containers, of_cluster, of_job
from pdserve.change import Change, change_of
from pdserve.cli.plan_recipe import Planned, located, plan_for
from pdserve.cluster_file import load_cluster
from pdserve.plan.allocation import check_allocation
from pdserve.plan.model import Node, Plan
from pdserve.preflight.finding import Finding
from pdserve.recipe.loader import LoadedRecipe
from pdserve.rundir import RunDir
from pdserve.survey import survey
from pdserve.versions import Versions


@dataclass(frozen=True)
class Surveyed:
    """The plan for nodes that somebody has looked at, and what keeps it from being started."""

    planned: Planned
    findings: tuple[Finding, ...]
    addresses: tuple[str, ...]
    """One line a node: its address and how it came to it."""


def candidates(
    loaded: LoadedRecipe, cluster: Path | None, *, this_machine: bool, words: Sequence[str]
) -> tuple[Candidates | None, tuple[str, ...]]:
    """None: this machine; and warnings. `words`: the recipe and its overrides, for the line to type when a job has the
    wrong shape. Raises RecipeError and PreflightError, before any node was spoken to."""
    recipe = loaded.recipe
    if cluster is not None:
        return of_cluster(load_cluster(cluster, environ=os.environ), recipe.exclude_nodes), ()
    found = None if this_machine else of_job(os.environ, recipe.exclude_nodes)
    if found is None:
        return None, ()
    with located(loaded):
        warning = check_allocation(recipe, found.all_names, found.gpus_per_node, words=words)
    return found, () if warning is None else (warning,)


def look(
    loaded: LoadedRecipe, found: Candidates, run: RunDir, *, over: Callable[[Planned], Planned] | None = None
) -> Surveyed:
    """Looks at all machines through scouts and plans for them. `over`: a deployment runs in `run`, and this fits the
    plan to it; only what would be started then is looked at. Raises PreflightError and RecipeError."""
    with located(loaded):
        there = in_containers(
            found,
            loaded.recipe,
            run_id=run.run_id,
            run_dir=str(run.path),
            recipe_dir=str(loaded.path.parent.absolute()),
        )
    made: list[Planned] = []

    def plan(nodes: Sequence[Node], versions: Versions) -> Plan:
        python = there.machines[0].command[-1]
        planned = plan_for(loaded, nodes, run_dir=str(run.path), run_id=run.run_id, versions=versions, python=python)
        made.append(planned if over is None else over(planned))
        return made[-1].plan

    def change(plan: Plan) -> Change:
        return change_of(run, plan)

    with located(loaded, there.file):
        seen = asyncio.run(
            survey(
                there,
                loaded.recipe,
                run_dir=run.path,
                plan_for=plan,
                change_for=None if over is None else change,
            )
        )
    lines = tuple(f"{node}: {address}" for node, address in seen.addresses.items())
    return Surveyed(made[-1], seen.findings, lines)
