"""Containers of a run that outlived the pipe of their agent: stopped by our label, never by name or image."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pdserve.plan.container import docker_list_argv, docker_stop_argv
from pdserve.plan.node import Node, Srun, in_docker, reach_argv
from pdserve.reach.slurm_variables import for_srun
from pdserve.system.process import Output, output_of

_LIST_SECONDS = 20.0
_STOP_SECONDS = 30.0
_WHY_CHARACTERS = 200


@dataclass(frozen=True)
class LeftContainers:
    """Containers of a run that ran when they were looked for."""

    names: tuple[str, ...] = ()
    """`ID on NODE`."""
    unknown: tuple[str, ...] = ()
    """`NODE (why)` of each node whose docker could not be asked, or did not stop them: containers may run there."""


async def stop_left_containers(nodes: Iterable[Node], run_id: str) -> LeftContainers:
    """Stops them on every node whose agent was in docker; which they were.

    A `docker run` that is killed leaves its container alone; the agent in it sees its pipe close and leaves by itself.
    This is for what did not.
    """
    return await _on_each(nodes, run_id, stop=True)


async def left_containers(nodes: Iterable[Node], run_id: str) -> LeftContainers:
    """Looks and stops nothing."""
    return await _on_each(nodes, run_id, stop=False)


async def _on_each(nodes: Iterable[Node], run_id: str, *, stop: bool) -> LeftContainers:
    there = [node for node in nodes if in_docker(node)]
    seen = await asyncio.gather(*(asyncio.to_thread(_on, node, run_id, stop=stop) for node in there))
    return LeftContainers(
        tuple(name for there in seen for name in there.names), tuple(name for there in seen for name in there.unknown)
    )


def _on(node: Node, run_id: str, *, stop: bool) -> LeftContainers:
    listed = _run(node, docker_list_argv(run_id, node.name), _LIST_SECONDS)
    if listed.code != 0:
        return LeftContainers(unknown=(_unknown(node, listed),))
    ids = listed.out.split()
    names = tuple(f"{container[:12]} on {node.name}" for container in ids)
    if ids and stop:
        stopped = _run(node, docker_stop_argv(ids, _STOP_SECONDS), 2 * _STOP_SECONDS)
        # One that has ended and removed itself meanwhile is an error of `docker stop`.
        if stopped.code != 0 and (left := _run(node, docker_list_argv(run_id, node.name), _LIST_SECONDS)).out.strip():
            return LeftContainers(names, (_unknown(node, stopped if left.code == 0 else left),))
    return LeftContainers(names)


def run_in_container(node: Node, arguments: Sequence[str], seconds: float) -> Output:
    """Runs `python ARGUMENTS` to its end in a container like that of the node's agent, which sees all processes of the
    node. Never raises for what comes of it."""
    program, verb, *rest = node.command
    return _run(node, (program, verb, "--pid=host", *rest, *arguments), seconds)


def _unknown(node: Node, tool: Output) -> str:
    why = (tool.err.strip().splitlines() or [f"exit code {tool.code}"])[-1]
    return f"{node.name} ({why[:_WHY_CHARACTERS]})"


def _run(node: Node, argv: tuple[str, ...], seconds: float) -> Output:
    in_slurm = isinstance(node.reach, Srun)
    # Of a pyxis container the step would be inside it; docker is the node's own.
    reach = node.reach.model_copy(update={"options": ()}) if in_slurm else node.reach
    whole = reach_argv(reach, node.name, f"containers-{node.name}", argv)
    return output_of(whole, timeout=seconds, environ=for_srun(os.environ) if in_slurm else None)
