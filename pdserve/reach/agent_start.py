"""Starts the agent of a node, by the way in the plan."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from pdserve.plan.node import Local, Node, agent_argv, has_lease, in_docker, step_name
from pdserve.reach.channel import Channel
from pdserve.reach.docker_hang import until_docker_hangs
from pdserve.reach.link import AgentLink
from pdserve.reach.protocol import Event
from pdserve.recipe.model import Timeouts


def open_agent(
    node: Node, run_dir: Path, run_id: str, timeouts: Timeouts, receive: Callable[[Event], None]
) -> AgentLink:
    """Starts agent and guard, in a session of their own here, so that a Ctrl-C of the terminal is not their business.

    They end when the link is closed or this process dies. On another node, and in docker, whose daemon holds the pipe,
    that may not be seen: there they also end when they hear nothing for their lease.
    """
    argv = agent_argv(node, run_dir=str(run_dir), run_id=run_id, timeouts=timeouts)
    log = run_dir / "logs" / f"agent@{node.name}.log"
    channel = Channel.open(node.reach, node.name, step_name(node.name), argv, log=log)
    heartbeat = timeouts.heartbeat_seconds if has_lease(node) else None
    if not in_docker(node):
        return AgentLink(node.name, channel, receive, heartbeat=heartbeat)
    hang = partial(until_docker_hangs, node.reach, node.name, log.parent)
    return AgentLink(node.name, channel, receive, heartbeat=heartbeat, program=_program(node), hang=hang)


def _program(node: Node) -> str:
    return "docker run" if isinstance(node.reach, Local) else f"docker run through {node.reach.kind}"
