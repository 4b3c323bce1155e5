"""Decide where a deployment goes, look at the nodes there before anything starts, and the plan for what is there.

`up`, `up --dry-run` and `preflight` use the same functions on this machine as on others: this machine is looked at in
this process, others through a probe on each, inside of the recipe's container where there is one.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pdserve.errors import PreflightError
from pdserve.installed.versions import Versions
from pdserve.launch.failure import failure_markdown
from pdserve.operations.current_run import running_places
from pdserve.operations.plan_recipe import PlannedRecipe, errors_with_lines, plan_for
from pdserve.plan.environment import Platform
from pdserve.plan.model import LmcacheServer, Plan
from pdserve.plan.node import Node
from pdserve.plan.running import NOTHING
from pdserve.plan.sbatch import check_allocation
from pdserve.preflight.agreement import compare
from pdserve.preflight.container_images import Report, provide_images
from pdserve.preflight.engine_packages import check_installed
from pdserve.preflight.fabric import Wish
from pdserve.preflight.facts import gather
from pdserve.preflight.finding import Finding, NodeNeed, raise_failed
from pdserve.preflight.node_checks import check_node
from pdserve.preflight.resources import given_back
from pdserve.preflight.survey import survey
from pdserve.reach.candidates import Candidates, in_containers, of_cluster, of_job, of_this_machine
from pdserve.reach.cluster_file import LoadedCluster, load_cluster
from pdserve.recipe.load.loader import LoadedRecipe
from pdserve.recipe.model import Recipe
from pdserve.run.change import recorded_change
from pdserve.run.directory import RunDir, home, new_run_id
from pdserve.run.retention import discard, discard_earlier, keep_failed_look
from pdserve.system.host import local_node

_IMAGES = ".images"
"""No deployment has such a name."""


@dataclass(frozen=True)
class Destination:
    """Names where a deployment goes. `machines` None: to this machine, and no container."""

    machines: Candidates | None
    warnings: tuple[str, ...] = ()

    @property
    def job(self) -> str | None:
        """Return the Slurm job whose nodes these are."""
        return None if self.machines is None else self.machines.job

    def names(self, platform: Platform) -> list[str]:
        """Return the names of the machines."""
        if self.machines is None:
            return [local_node(platform).name]
        return [machine.name for machine in self.machines.machines]


def choose_destination(
    loaded: LoadedRecipe, cluster: Path | None, *, this_machine: bool, words: Sequence[str]
) -> Destination:
    """Choose the hosts of a cluster file, the nodes of the Slurm job around this command, or this machine.

    `cluster`: a file of hosts; `this_machine`: no other one, inside a Slurm job either; at most one of the two.
    `words`: the recipe and its overrides, for the line to type when a job has the wrong shape. Raises RecipeError and
    PreflightError, before any node is asked."""
    recipe = loaded.recipe
    if cluster is not None:
        return Destination(of_cluster(load_cluster(cluster, environ=os.environ), recipe.exclude_nodes))
    machines = None if this_machine else of_job(os.environ, recipe.exclude_nodes)
    if machines is None:
        return Destination(of_this_machine(recipe.platform) if recipe.container is not None else None)
    with errors_with_lines(loaded):
        warning = check_allocation(recipe, machines.all_names, machines.gpus_per_node, words=words)
    return Destination(machines, () if warning is None else (warning,))


@dataclass(frozen=True)
class CheckedPlan:
    """Holds the plan for nodes that were looked at, and what keeps it from being started."""

    planned: PlannedRecipe
    findings: tuple[Finding, ...]
    nodes: tuple[str, ...] = ()
    """Each node of other machines has a line: its address and how it came to it."""
    cluster: LoadedCluster | None = None

    def raise_failed(self) -> None:
        """Raise one PreflightError with all that has failed."""
        with errors_with_lines(self.planned.loaded, self.cluster):
            raise_failed(self.findings)


def look(
    loaded: LoadedRecipe,
    machines: Candidates | None,
    run: RunDir | None,
    *,
    report: Report,
    running: bool = False,
    fabric: Wish | None = None,
) -> CheckedPlan:
    """Check the nodes, and plan for what they have. Raises PreflightError and RecipeError when no plan can be made.

    `machines` None: this one. `run` None: for a look alone; its run directory is gone afterwards, unless a node cannot
    be looked at (run/retention.py). `running`: a deployment runs in `run`; the plan is fitted to it, and only what
    would be started or replaced is looked at. `report` gets lines of what takes long: an image that is fetched, because
    the nodes are looked at from inside of it. `fabric`: also try transfers between the nodes."""
    if machines is None:
        return _check_this_machine(loaded, run, running=running)
    if run is not None:
        _provide_image(loaded, machines, run, report)
        return _check_nodes(loaded, machines, run, running=running, fabric=fabric)
    run = RunDir(home(os.environ) / loaded.recipe.name / f"preflight-{new_run_id()}")
    discard_earlier(run.path.parent)
    try:
        run.make()
        return look(loaded, machines, run, report=report, fabric=fabric)
    except PreflightError as error:
        keep_failed_look(run, failure_markdown(error, loaded.recipe.name, None, ()))
        raise
    finally:
        discard(run)


def plan_beside(loaded: LoadedRecipe, run: RunDir) -> PlannedRecipe:
    """Plan for a deployment that runs on this machine."""
    node = local_node(loaded.recipe.platform)
    return plan_for(loaded, [node], run_dir=str(run.path), run_id=run.run_id, running=running_places(run))


def _check_this_machine(loaded: LoadedRecipe, run: RunDir | None, *, running: bool) -> CheckedPlan:
    """Plan a recipe on this machine and check it. `run` None: the plan names placeholders in its place."""
    if run is not None and running:
        planned = plan_beside(loaded, run)
        (node,) = planned.plan.nodes
        changes = recorded_change(run, planned.plan)
        findings = _run_checks(
            planned,
            starting=changes.starting,
            held_by_us=changes.ports[node.name],
            gives_back=given_back(run.read_plan(), node.name, changes.replaced),
        )
        return CheckedPlan(planned, findings)
    planned = plan_for(
        loaded,
        [local_node(loaded.recipe.platform)],
        run_dir="RUN_DIR" if run is None else str(run.path),
        run_id="RUN_ID" if run is None else run.run_id,
    )
    return CheckedPlan(planned, _run_checks(planned))


def _check_nodes(
    loaded: LoadedRecipe, machines: Candidates, run: RunDir, *, running: bool, fabric: Wish | None
) -> CheckedPlan:
    with errors_with_lines(loaded):
        there = in_containers(
            machines,
            loaded.recipe,
            run_id=run.run_id,
            run_dir=str(run.path),
            recipe_dir=str(loaded.path.parent.absolute()),
            store=image_store(loaded.recipe),
        )
    planned: PlannedRecipe | None = None

    def plan(nodes: Sequence[Node], versions: Versions) -> Plan:
        nonlocal planned
        planned = plan_for(
            loaded,
            nodes,
            run_dir=str(run.path),
            run_id=run.run_id,
            versions=versions,
            running=running_places(run) if running else NOTHING,
        )
        return planned.plan

    with errors_with_lines(loaded, there.file):
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
    return CheckedPlan(planned, seen.findings, lines, there.file)


def _run_checks(
    planned: PlannedRecipe,
    *,
    starting: Collection[str] | None = None,
    held_by_us: Collection[int] = (),
    gives_back: Collection[LmcacheServer] = (),
) -> tuple[Finding, ...]:
    """Run all checks of this machine, which the plan is for. The rest is as `check_node` has it."""
    (node,) = (planned_node.name for planned_node in planned.plan.nodes)
    recipe = planned.loaded.recipe
    facts = gather(platform=recipe.platform, python=recipe.engine.python)
    checked = check_node(
        planned.plan, node, facts=facts, starting=starting, held_by_us=held_by_us, gives_back=gives_back
    )
    lacking = list(_missing_packages(planned, node))
    compared = compare(planned.plan, {node: facts})
    if lacking:
        # The same finding, with how to get it.
        compared = [finding for finding in compared if (finding.check, finding.status) != ("versions", "failed")]
    return (*lacking, *compared, *checked)


def _missing_packages(planned: PlannedRecipe, node: str) -> Iterator[Finding]:
    """Find only what is missing: `compare` checks the versions."""
    try:
        check_installed(planned.versions, planned.plan, planned.loaded.recipe)
    except PreflightError as error:
        yield NodeNeed(node, "versions", "the packages of the plan").refused(error)


def image_store(recipe: Recipe) -> str:
    """Return the folder of the files that apptainer and pyxis make of images."""
    named = None if recipe.container is None else recipe.container.store
    return named or str(home(os.environ) / _IMAGES)


def _provide_image(loaded: LoadedRecipe, machines: Candidates, run: RunDir, report: Report) -> None:
    """Fetch the image of the recipe's container on every node. Raises PreflightError with each that cannot have it."""
    recipe = loaded.recipe
    if recipe.container is None:
        return
    with errors_with_lines(loaded):
        asyncio.run(
            provide_images(machines.machines, recipe, run_dir=run.path, store=image_store(recipe), report=report)
        )
