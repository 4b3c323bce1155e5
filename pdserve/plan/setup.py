"""The recipe's setup: one process for each command and node, each done before the next one starts.

It runs where the engines will: the agent of the node starts it, and where there is a container that is inside it. On
several nodes the same command runs on all of them at once, and the next one begins when all are done.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pdserve.plan.environment import setup_env
from pdserve.plan.nodes.placement import Instance
from pdserve.plan.process import ExitProbe, Process
from pdserve.plan.weights import START_STAGE as WEIGHTS_STAGE
from pdserve.plan.weights import STOP_STAGE
from pdserve.recipe.model import Recipe
from pdserve.recipe.setup import words_of


def setup_processes(recipe: Recipe, instances: Sequence[Instance], *, hosts: Sequence[str]) -> Iterator[Process]:
    """setup-0, setup-1, ... on the first node that hosts an engine, setup-0-node1, ... on the further ones."""
    nodes = list(dict.fromkeys(share.node.name for instance in instances for share in instance.shares))
    for index, command in enumerate(recipe.setup):
        for rank, node in enumerate(nodes):
            name = f"setup-{index}" if rank == 0 else f"setup-{index}-node{rank}"
            yield Process(
                name=name,
                role="setup",
                node=node,
                argv=words_of(command),
                env=setup_env(recipe, hosts),
                log=f"logs/{name}@{node}.log",
                probe=ExitProbe(),
                start_stage=WEIGHTS_STAGE - len(recipe.setup) + index,
                stop_stage=STOP_STAGE,
                ready_seconds=recipe.timeouts.setup_seconds,
                stop_seconds=recipe.timeouts.stop_seconds,
            )
