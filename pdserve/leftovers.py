"""What still runs of a deployment whose launcher is gone, from its recorded PIDs and start times."""

from __future__ import annotations

from pdserve import procfs
from pdserve.state import DeploymentState


def living(state: DeploymentState) -> list[str]:
    """`name PID command` of every recorded process that is exactly the one that we started and still lives."""
    recorded = {name: process.id for name, process in state.processes.items() if process.id is not None}
    for node, agents in state.nodes.items():
        recorded[f"agent@{node}"] = agents.agent
        recorded[f"guard@{node}"] = agents.guard
    return [f"{name} PID {one.pid} {procfs.command(one.pid)[:100]}" for name, one in recorded.items() if one.alive()]
