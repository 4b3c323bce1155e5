"""A look at the nodes of a deployment before anything starts there, and the plan for what is there.

`up`, `up --dry-run` and `preflight` use the same functions on this machine as on others: this machine is looked at in
this process, others through a probe on each.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from pdserve.errors import PreflightError
from pdserve.installed.versions import Versions
from pdserve.launch.failure import report as failure_report
from pdserve.operations.current_run import places
from pdserve.operations.images import image_store, provide
from pdserve.operations.interpreters import as_running
from pdserve.operations.plan_recipe import Planned, located, plan_for
from pdserve.plan.model import LmcacheServer, Plan
from pdserve.plan.nodes.node import Node
from pdserve.plan.running import NOTHING
from pdserve.preflight.engine_packages import check_installed
from pdserve.preflight.fabric.paths import Wish
from pdserve.preflight.facts import gather
from pdserve.preflight.finding import Finding, of_error, raise_failed
from pdserve.preflight.memory import given_back
from pdserve.preflight.node_checks import check_node
from pdserve.preflight.nodes.agreement import compare
from pdserve.preflight.nodes.container_stage import Report
from pdserve.preflight.nodes.survey import survey
from pdserve.reach.candidates import Candidates, in_containers
from pdserve.reach.cluster_file import LoadedCluster
from pdserve.recipe.load.loader import LoadedRecipe
from pdserve.run.change import recorded_change
from pdserve.run.directory import RunDir, home, new_run_id
from pdserve.run.failed_look import discard, discard_earlier, keep_failed_look
from pdserve.system.host import local_node


@dataclass(frozen=True)
class Looked:
    """The plan for nodes that were looked at, and what keeps it from being started."""

    planned: Planned
    findings: tuple[Finding, ...]
    nodes: tuple[str, ...] = ()
    """One line a node of other machines: its address and how it came to it."""
    notes: tuple[str, ...] = ()
    """Differences from the plan that runs which a user may not expect."""
    cluster: LoadedCluster | None = None

    def raise_failed(self) -> None:
        """Raises one PreflightError with all that has failed."""
        with located(self.planned.loaded, self.cluster):
            raise_failed(self.findings)


def look(
    loaded: LoadedRecipe,
    machines: Candidates | None,
    run: RunDir,
    *,
    report: Report,
    running: bool = False,
    fabric: Wish | None = None,
) -> Looked:
    """`machines` None: this one. `running`: a deployment runs in `run`; the plan is fitted to it, and only what would
    be started or replaced is looked at. `report` gets lines of what takes long: an image that is fetched, because the
    nodes are looked at from inside of it. `fabric`: also try transfers between the nodes. Raises PreflightError and
    RecipeError when there is no plan to be had."""
    if machines is None:
        return _look_here(loaded, run, running=running)
    provide(loaded, machines, run, report)
    return _look_there(loaded, machines, run, running=running, fabric=fabric)


def look_once(loaded: LoadedRecipe, machines: Candidates | None, report: Report, fabric: Wish | None = None) -> Looked:
    """`look` through a run directory that is gone afterwards, unless a node cannot be looked at (failed_look.py)."""
    if machines is None:
        return _look_here(loaded, None, running=False)
    run = RunDir(home(os.environ) / loaded.recipe.name / f"preflight-{new_run_id()}")
    discard_earlier(run.path.parent)
    try:
        run.make()
        return look(loaded, machines, run, report=report, fabric=fabric)
    except PreflightError as error:
        keep_failed_look(run, failure_report(error, loaded.recipe.name, None, ()))
        raise
    finally:
        discard(run)


def plan_beside(loaded: LoadedRecipe, run: RunDir) -> tuple[Planned, tuple[str, ...]]:
    """The plan for a deployment that runs on this machine, and notes as in `Looked`."""
    node = local_node(loaded.recipe.platform)
    planned = plan_for(loaded, [node], run_dir=str(run.path), run_id=run.run_id, running=places(run))
    return _fitted(planned, run)


def _look_here(loaded: LoadedRecipe, run: RunDir | None, *, running: bool) -> Looked:
    """`run` None: the plan names placeholders in its place."""
    if run is not None and running:
        planned, notes = plan_beside(loaded, run)
        (node,) = planned.plan.nodes
        changes = recorded_change(run, planned.plan)
        findings = _check_here(
            planned,
            starting=changes.starting,
            held_by_us=changes.ports[node.name],
            gives_back=given_back(run.read_plan(), node.name, changes.replaced),
        )
        return Looked(planned, findings, notes=notes)
    planned = plan_for(
        loaded,
        [local_node(loaded.recipe.platform)],
        run_dir="RUN_DIR" if run is None else str(run.path),
        run_id="RUN_ID" if run is None else run.run_id,
    )
    return Looked(planned, _check_here(planned))


def _look_there(
    loaded: LoadedRecipe, machines: Candidates, run: RunDir, *, running: bool, fabric: Wish | None
) -> Looked:
    with located(loaded):
        there = in_containers(
            machines,
            loaded.recipe,
            run_id=run.run_id,
            run_dir=str(run.path),
            recipe_dir=str(loaded.path.parent.absolute()),
            store=image_store(loaded.recipe),
        )
    planned: Planned | None = None
    notes: tuple[str, ...] = ()

    def plan(nodes: Sequence[Node], versions: Versions) -> Plan:
        nonlocal planned, notes
        planned = plan_for(
            loaded,
            nodes,
            run_dir=str(run.path),
            run_id=run.run_id,
            versions=versions,
            running=places(run) if running else NOTHING,
        )
        if running:
            planned, notes = _fitted(planned, run)
        return planned.plan

    with located(loaded, there.file):
        seen = asyncio.run(
            survey(
                there,
                loaded.recipe,
                run_dir=run.path,
                plan_for=plan,
                change_for=(lambda plan: recorded_change(run, plan)) if running else None,
                fabric=fabric,
            )
        )
    assert planned is not None
    lines = tuple(f"{node}: {address}" for node, address in seen.addresses.items())
    return Looked(planned, seen.findings, lines, notes, there.file)


def _fitted(planned: Planned, run: RunDir) -> tuple[Planned, tuple[str, ...]]:
    plan, notes = as_running(run.read_plan(), planned.plan)
    return replace(planned, plan=plan), notes


def _check_here(
    planned: Planned,
    *,
    starting: Collection[str] | None = None,
    held_by_us: Collection[int] = (),
    gives_back: Collection[LmcacheServer] = (),
) -> tuple[Finding, ...]:
    """All checks of this machine, which the plan is for. The rest is as `check_node` has it."""
    (node,) = (planned_node.name for planned_node in planned.plan.nodes)
    recipe = planned.loaded.recipe
    facts = gather(platform=recipe.platform, python=recipe.engine.python)
    checked = check_node(
        planned.plan, node, facts=facts, starting=starting, held_by_us=held_by_us, gives_back=gives_back
    )
    lacking = list(_installed(planned, node))
    compared = compare(planned.plan, {node: facts})
    if lacking:
        # The same finding, with how to get it.
        compared = [finding for finding in compared if (finding.check, finding.status) != ("versions", "failed")]
    return (*lacking, *compared, *checked)


def _installed(planned: Planned, node: str) -> Iterator[Finding]:
    """Only what is missing: `compare` checks the versions."""
    try:
        check_installed(planned.versions, planned.plan, planned.loaded.recipe)
    except PreflightError as error:
        yield of_error(node, "versions", "the packages of the plan", error)
