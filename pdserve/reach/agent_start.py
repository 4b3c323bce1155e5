"""Starts the agent of a node, by the way in the plan."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from pdserve.plan.model import Node
from pdserve.plan.nodes.reach import Local, term_seconds
from pdserve.reach.channel import Channel
from pdserve.reach.containers import in_docker
from pdserve.reach.link import BEATS, AgentLink
from pdserve.reach.protocol import Event
from pdserve.recipe.model import Timeouts


def open_agent(
    node: Node, run_dir: Path, run_id: str, timeouts: Timeouts, receive: Callable[[Event], None]
) -> AgentLink:
    """Starts agent and guard, in a session of their own here, so that a Ctrl-C of the terminal is not their business.

    They end when the link is closed or this process dies. On another node, and in docker, whose daemon holds the pipe,
    that may not be seen: there they also end when they hear nothing for their lease.
    """
    contained = in_docker(node)
    remote = contained or not isinstance(node.reach, Local)
    argv = [
        *(node.command or (sys.executable,)),
        *("-m", "pdserve.node.agent"),
        *("--node", node.name, "--run-dir", str(run_dir), "--run-id", run_id),
    ]
    if remote:
        pulse = timeouts.heartbeat_seconds / BEATS
        argv += ["--pulse", f"{pulse:g}", "--lease", f"{timeouts.agent_lease_seconds:g}"]
    if (seconds := term_seconds(node.reach)) is not None:
        argv += ["--term-seconds", f"{seconds:g}"]
    log = run_dir / "logs" / f"agent@{node.name}.log"
    channel = Channel.open(node.reach, node.name, f"pdserve-{node.name}", argv, log=log)
    heartbeat = timeouts.heartbeat_seconds if remote else None
    return AgentLink(node.name, channel, receive, heartbeat=heartbeat, program=_program(node) if contained else None)


def _program(node: Node) -> str:
    return "docker run" if isinstance(node.reach, Local) else f"docker run through {node.reach.kind}"
