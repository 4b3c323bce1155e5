"""The command line that starts a node's agent: what `up` runs, and what `render` and `up --dry-run` show."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from pdserve.plan.nodes.node import Node
from pdserve.plan.nodes.reach import Local, reach_argv, term_seconds
from pdserve.recipe.model import Timeouts

BEATS = 5
"""Beats in the length of a heartbeat: four may be late before a node counts as lost."""


def in_docker(node: Node) -> bool:
    """Whether the agent of a node is in a container of a docker daemon, through which its pipe leads."""
    return node.command[:1] == ("docker",)


def has_lease(node: Node) -> bool:
    """Whether its agent ends when it hears nothing for a time. On another node, and in docker, whose daemon holds the
    pipe, the end of the launcher may close nothing."""
    return not isinstance(node.reach, Local) or in_docker(node)


def step_name(node: str) -> str:
    """Of the Slurm step that an agent is."""
    return f"pdserve-{node}"


def agent_argv(node: Node, *, run_dir: str, run_id: str, timeouts: Timeouts) -> list[str]:
    """What runs on the node."""
    argv = [
        *(node.command or (sys.executable,)),
        *("-m", "pdserve.node.agent"),
        *("--node", node.name, "--run-dir", run_dir, "--run-id", run_id),
    ]
    if has_lease(node):
        pulse = timeouts.heartbeat_seconds / BEATS
        argv += ["--pulse", f"{pulse:g}", "--lease", f"{timeouts.agent_lease_seconds:g}"]
    if (seconds := term_seconds(node.reach)) is not None:
        argv += ["--term-seconds", f"{seconds:g}"]
    return argv


def with_agent(node: Node, *, run_dir: str, run_id: str, timeouts: Timeouts) -> Node:
    """The node with the line that starts its agent from here: docker, srun or ssh. Secrets are not in it: the launcher
    sends them to the agent."""
    argv: Sequence[str] = agent_argv(node, run_dir=run_dir, run_id=run_id, timeouts=timeouts)
    return node.model_copy(update={"agent": reach_argv(node.reach, node.name, step_name(node.name), argv)})
