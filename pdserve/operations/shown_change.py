"""Show what `pdserve up` would do to a deployment that runs, before it is done."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from pdserve.operations.current_run import check_place, find_running
from pdserve.operations.look import Destination, image_store, look, plan_beside
from pdserve.operations.plan_recipe import PlannedRecipe, errors_with_lines
from pdserve.plan.frozen import Frozen
from pdserve.plan.model import Plan
from pdserve.plan.node import Local, Node, Srun, with_agent
from pdserve.preflight.container_images import Report
from pdserve.reach.candidates import DEFAULT_KILL_WAIT_SECONDS, Candidate, Candidates, in_containers
from pdserve.recipe.load.loader import LoadedRecipe
from pdserve.run.change import LIVING, Change, change
from pdserve.run.directory import RunDir, home


class ShownChange(Frozen):
    """Holds the names of processes that a change starts, restarts, stops or leaves, in plan order. What has done its
    one thing and ended, as a download, is in none."""

    run: str
    """This is the directory of the run."""
    start: tuple[str, ...]
    restart: tuple[str, ...]
    stop: tuple[str, ...]
    stay: tuple[str, ...]
    """Run on as they are."""

    def lines(self, *, replace: bool) -> Iterator[str]:
        """Yield the change as lines. `replace`: restarts of more than the proxy were asked for."""
        if not (self.start or self.restart or self.stop):
            yield f"this deployment runs ({self.run}), and pdserve up would change nothing"
            return
        yield f"this deployment runs ({self.run}); pdserve up would"
        costly = tuple(name for name in self.restart if name != "proxy")
        refused = bool(costly) and not replace
        others = tuple(name for name in self.restart if name == "proxy") if refused else self.restart
        words = {"start": self.start, "restart": others, "stop": self.stop, "leave alone": self.stay}
        yield from (f"  {what} {', '.join(names)}" for what, names in words.items() if names)
        if refused:
            yield f"  restart {', '.join(costly)}: only with --replace, and without it nothing at all is done"


def shown_change(run: str, plan: Plan, new: Plan, changes: Change, living: Collection[str]) -> ShownChange:
    """Return what `up` shows of a change. `plan`: the one that runs; `living`: its processes that live, by their
    phase."""
    lasting = {process.name for process in (*plan.processes, *new.processes) if not process.ends_when_done}
    return ShownChange(
        run=run,
        start=tuple(name for name in changes.starting if name not in living),
        restart=tuple(name for name in changes.starting if name in living),
        stop=tuple(name for name in changes.gone if name in living and name in lasting),
        stay=tuple(name for name in new.names() if name not in changes.starting and name in lasting),
    )


def change_there(loaded: LoadedRecipe, there: Destination, report: Report) -> tuple[Plan, ShownChange] | None:
    """Return the plan that `up` would go on with, and what it would do for it. None: no deployment of this name runs.
    Other machines are looked at, as `up` does. Raises StateError where it runs elsewhere, and what `look` raises."""
    if (run := find_running(home(os.environ), loaded.recipe.name)) is None:
        return None
    check_place(run, there.names(loaded.recipe.platform), job=there.job)
    if there.machines is None:
        plan = plan_beside(loaded, run).plan
    else:
        plan = look(loaded, there.machines, run, report=report, running=True).planned.plan
    return plan, _change_of_record(run, plan)


def _change_of_record(run: RunDir, plan: Plan) -> ShownChange:
    old, state = run.read_plan(), run.read_state()
    living = {name for name, process in state.processes.items() if process.phase in LIVING}
    return shown_change(str(run.path), old, plan, change(old, plan, living), living)


RUN_ID = "RUN_ID"
"""This stands in the place of the id that each run gets."""
_JOB = "JOB_ID"


def shown_nodes(loaded: LoadedRecipe, machines: Candidates, nodes: Sequence[Node]) -> list[Node]:
    """Return `nodes` of `machines`, with the lines that would start their agents. Raises PreflightError where the
    recipe's container cannot be had on them."""
    run_dir = str(home(os.environ) / loaded.recipe.name / RUN_ID)
    folder = str(loaded.path.parent.absolute())
    store = image_store(loaded.recipe)
    with errors_with_lines(loaded):
        there = in_containers(machines, loaded.recipe, run_id=RUN_ID, run_dir=run_dir, recipe_dir=folder, store=store)
    by_name = {machine.name: machine for machine in there.machines}
    return [
        with_agent(
            node.model_copy(update={"reach": by_name[node.name].reach, "command": by_name[node.name].command}),
            run_dir=run_dir,
            run_id=RUN_ID,
            timeouts=loaded.recipe.timeouts,
        )
        for node in nodes
    ]


def with_shown_agents(planned: PlannedRecipe) -> PlannedRecipe:
    """Return a plan for nodes that are not known yet: several nodes, and pyxis, are shown as a Slurm job has them. One
    node without a container is this machine, and its agent a child of the launcher."""
    recipe, nodes = planned.loaded.recipe, planned.plan.nodes
    in_job = len(nodes) > 1 or (recipe.container is not None and recipe.container.kind == "pyxis")
    if not in_job and recipe.container is None:
        return planned
    reach = Srun(job=_JOB, kill_wait=DEFAULT_KILL_WAIT_SECONDS) if in_job else Local()
    machines = Candidates("a Slurm job", tuple(Candidate(name=n.name, reach=reach, target=n.name) for n in nodes))
    shown = tuple(shown_nodes(planned.loaded, machines, nodes))
    return replace(planned, plan=planned.plan.model_copy(update={"nodes": shown}))
