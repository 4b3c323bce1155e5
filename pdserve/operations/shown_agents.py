"""Plans that are only shown, with the docker, srun or ssh line of each node."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

from pdserve.operations.images import image_store
from pdserve.operations.plan_recipe import Planned, located
from pdserve.plan.nodes.agent_line import with_agent
from pdserve.plan.nodes.node import Node
from pdserve.plan.nodes.reach import Local, Srun
from pdserve.reach.candidates import DEFAULT_KILL_WAIT_SECONDS, Candidate, Candidates, in_containers
from pdserve.recipe.load.loader import LoadedRecipe
from pdserve.run.directory import home

RUN_ID = "RUN_ID"
"""In the place of the id that each run gets."""
_JOB = "JOB_ID"


def shown_nodes(loaded: LoadedRecipe, machines: Candidates, nodes: Sequence[Node]) -> list[Node]:
    """`nodes` of `machines`, with the lines that would start their agents. Raises PreflightError where the recipe's
    container cannot be had on them."""
    run_dir = str(home(os.environ) / loaded.recipe.name / RUN_ID)
    folder = str(loaded.path.parent.absolute())
    store = image_store(loaded.recipe)
    with located(loaded):
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


def with_shown_agents(planned: Planned) -> Planned:
    """A plan for nodes that are not known yet: several nodes, and pyxis, are shown as a Slurm job has them. One node
    without a container is this machine, and its agent a child of the launcher."""
    recipe, nodes = planned.loaded.recipe, planned.plan.nodes
    in_job = len(nodes) > 1 or (recipe.container is not None and recipe.container.kind == "pyxis")
    if not in_job and recipe.container is None:
        return planned
    reach = Srun(job=_JOB, kill_wait=DEFAULT_KILL_WAIT_SECONDS) if in_job else Local()
    machines = Candidates("a Slurm job", tuple(Candidate(name=n.name, reach=reach, target=n.name) for n in nodes))
    shown = tuple(shown_nodes(planned.loaded, machines, nodes))
    return replace(planned, plan=planned.plan.model_copy(update={"nodes": shown}))
