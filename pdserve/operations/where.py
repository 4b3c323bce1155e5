"""Where a deployment goes: this machine, the nodes of the Slurm job around the command, or a cluster file's hosts. And
what keeps it from being started there: `preflight` and `up` look through the same functions."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import typer

from pdserve.errors import PreflightError
from pdserve.installed.versions import Versions
from pdserve.operations.plan_recipe import Planned, located, plan_for
from pdserve.plan.model import LmcacheServer, Node, Plan
from pdserve.plan.nodes.allocation import check_allocation
from pdserve.preflight.engine_packages import check_installed
from pdserve.preflight.facts import gather
from pdserve.preflight.finding import Finding, of_error
from pdserve.preflight.node_checks import check_node
from pdserve.preflight.nodes.agreement import compare
from pdserve.preflight.nodes.survey import survey
from pdserve.reach.candidates import Candidates, in_containers, of_cluster, of_job
from pdserve.reach.cluster_file import load_cluster
from pdserve.recipe.load.loader import LoadedRecipe
from pdserve.run.change import Change, change_of
from pdserve.run.directory import RunDir, home, new_run_id


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
    wrong shape. Raises RecipeError and PreflightError, before any node was spoken to, and BadParameter."""
    if cluster is not None and this_machine:
        raise typer.BadParameter(
            "--cluster names the hosts to use, --this-machine takes none of them: give one of the two"
        )
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


def look_here(
    planned: Planned,
    *,
    starting: Collection[str] | None = None,
    held_by_us: Collection[int] = (),
    gives_back: Collection[LmcacheServer] = (),
) -> tuple[Finding, ...]:
    """Looks at this machine, which the plan is for. The rest is as `check_node` has it."""
    (node,) = (one.name for one in planned.plan.nodes)
    recipe = planned.loaded.recipe
    facts = gather(platform=recipe.platform, python=recipe.engine.python)
    checked = check_node(
        planned.plan, node, facts=facts, starting=starting, held_by_us=held_by_us, gives_back=gives_back
    )
    lacking = list(_installed(planned, node))
    compared = compare(planned.plan, {node: facts})
    if lacking:
        # It says the same, and how to get it.
        compared = [one for one in compared if (one.check, one.status) != ("versions", "failed")]
    return (*lacking, *compared, *checked)


def look_once(loaded: LoadedRecipe, found: Candidates) -> Surveyed:
    """`look` through a run directory that is gone afterwards. It stays when a node cannot be looked at: the error names
    a log in it."""
    run = RunDir.create(home(os.environ), loaded.recipe.name, f"preflight-{new_run_id()}")
    seen = look(loaded, found, run)
    shutil.rmtree(run.path)
    return seen


def _installed(planned: Planned, node: str) -> Iterator[Finding]:
    """Only what is missing: versions are compared elsewhere."""
    try:
        check_installed(planned.versions, planned.plan, planned.loaded.recipe)
    except PreflightError as error:
        yield of_error(node, "versions", "the packages of the plan", error)
