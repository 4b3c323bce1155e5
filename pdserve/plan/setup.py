"""The recipe's setup: one process for each command and node, each done before the next one starts.

It runs where the engines will: the agent of the node starts it, and where there is a container that is inside it. On
several nodes the same command runs on all of them at once, and the next one begins when all are done.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pdserve.plan.environment import setup_env
from pdserve.plan.nodes.placement import Instance
from pdserve.plan.process import ExitProbe, Process
from pdserve.plan.running import Running
from pdserve.plan.weights import START_STAGE as WEIGHTS_STAGE
from pdserve.plan.weights import STOP_STAGE
from pdserve.recipe.model import Recipe
from pdserve.recipe.sections import words_of


def setup_processes(
    recipe: Recipe, instances: Sequence[Instance], *, hosts: Sequence[str], running: Running
) -> Iterator[Process]:
    """setup-0, setup-1, ... on the first node that hosts an engine, setup-0-node1, ... on the further ones. A node that
    was set up keeps its number."""
    nodes = dict.fromkeys(share.node.name for instance in instances for share in instance.shares)
    for index, command in enumerate(recipe.setup):
        for node, rank in _numbers(list(nodes), running).items():
            name = _name(index, rank)
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


def _name(index: int, rank: int) -> str:
    return f"setup-{index}" if rank == 0 else f"setup-{index}-node{rank}"


def _numbers(nodes: Sequence[str], running: Running) -> dict[str, int]:
    """Node -> its number in the names."""
    last = len(nodes) + len(running.of_role("setup"))
    done = {process.node: rank for rank in range(last) if (process := running.process(_name(0, rank))) is not None}
    free = iter([rank for rank in range(last) if rank not in done.values()])
    return {node: done[node] if node in done else next(free) for node in nodes}
