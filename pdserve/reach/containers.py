"""Containers of a run that outlived the pipe of their agent: stopped by our label, never by name or image."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable

from pdserve.plan.model import Node
from pdserve.plan.nodes.container import docker_list_argv, docker_stop_argv
from pdserve.plan.nodes.reach import Srun, reach_argv
from pdserve.reach.slurm_variables import for_srun
from pdserve.system.process import output_of

_LIST_SECONDS = 20.0
_STOP_SECONDS = 30.0


async def stop_left_containers(nodes: Iterable[Node], run_id: str) -> list[str]:
    """Looks on every node whose agent was in docker. Returns `ID on NODE` of those that were still there.

    A `docker run` that is killed leaves its container alone; the agent in it sees its pipe close and leaves by itself.
    This is for what did not.
    """
    boxed = [node for node in nodes if node.command[:1] == ("docker",)]
    by_node = await asyncio.gather(*(asyncio.to_thread(_stop_on, node, run_id) for node in boxed))
    return [container for there in by_node for container in there]


def _stop_on(node: Node, run_id: str) -> list[str]:
    ids = _run(node, docker_list_argv(run_id, node.name), _LIST_SECONDS).split()
    if ids:
        _run(node, docker_stop_argv(ids, _STOP_SECONDS), 2 * _STOP_SECONDS)
    return [f"{container_id[:12]} on {node.name}" for container_id in ids]


def _run(node: Node, argv: tuple[str, ...], seconds: float) -> str:
    in_slurm = isinstance(node.reach, Srun)
    # Of a pyxis container the step would be inside it; docker is the node's own.
    reach = node.reach.model_copy(update={"options": ()}) if in_slurm else node.reach
    whole = reach_argv(reach, node.name, f"containers-{node.name}", argv)
    return output_of(whole, timeout=seconds, environ=for_srun(os.environ) if in_slurm else None).out
