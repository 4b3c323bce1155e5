"""Where a deployment goes: this machine, the nodes of the Slurm job around the command, or a cluster file's hosts."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pdserve.operations.plan_recipe import located
from pdserve.plan.engines.devices import Platform
from pdserve.plan.nodes.allocation import check_allocation
from pdserve.reach.candidates import Candidates, of_cluster, of_job, of_this_machine
from pdserve.reach.cluster_file import load_cluster
from pdserve.recipe.load.loader import LoadedRecipe
from pdserve.system.host import local_node


@dataclass(frozen=True)
class Where:
    """`machines` None: this machine, and no container."""

    machines: Candidates | None
    warnings: tuple[str, ...] = ()

    @property
    def job(self) -> str | None:
        """The Slurm job whose nodes these are."""
        return None if self.machines is None else self.machines.job

    def names(self, platform: Platform) -> list[str]:
        """Of the machines."""
        if self.machines is None:
            return [local_node(platform).name]
        return [machine.name for machine in self.machines.machines]


def where(loaded: LoadedRecipe, cluster: Path | None, *, this_machine: bool, words: Sequence[str]) -> Where:
    """`cluster`: a file of hosts; `this_machine`: no other one, inside a Slurm job either; at most one of the two.
    `words`: the recipe and its overrides, for the line to type when a job has the wrong shape. Raises RecipeError and
    PreflightError, before any node is asked."""
    recipe = loaded.recipe
    if cluster is not None:
        return Where(of_cluster(load_cluster(cluster, environ=os.environ), recipe.exclude_nodes))
    machines = None if this_machine else of_job(os.environ, recipe.exclude_nodes)
    if machines is None:
        return Where(of_this_machine(recipe.platform) if recipe.container is not None else None)
    with located(loaded):
        warning = check_allocation(recipe, machines.all_names, machines.gpus_per_node, words=words)
    return Where(machines, () if warning is None else (warning,))
