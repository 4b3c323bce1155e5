"""Clear up what is left of a run whose agents are in docker containers: the containers, and the shared memory of those
that were killed.

The processes of a container end with its first one, all at once, so that neither agent nor guard is left to remove what
they had in /dev/shm, which is the node's own. Their ledger is in the run directory.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from pdserve.node.agent_record import ledger_file
from pdserve.plan.model import Plan
from pdserve.plan.node import Local, Node, in_docker
from pdserve.reach.containers import (
    LeftContainers,
    left_containers,
    run_in_container,
    stop_left_containers,
)
from pdserve.run.directory import RunDir
from pdserve.run.state import DeploymentState
from pdserve.system.host import is_named_here
from pdserve.system.shared_memory import ShmLedger

_REMOVE_SECONDS = 60.0


@dataclass(frozen=True)
class ClearedContainers:
    """The containers that were cleared up, and where that is not known."""

    containers: LeftContainers = field(default_factory=LeftContainers)
    memory: tuple[str, ...] = ()
    """Names in /dev/shm of their nodes."""
    nodes: tuple[str, ...] = ()
    """Where no container of the run is left."""

    def lines(self) -> list[str]:
        """Return lines for people; none where nothing was left."""
        lines = []
        if self.containers.names:
            lines.append(
                f"containers that outlived their agent's pipe were stopped: {', '.join(self.containers.names)}"
            )
        if self.containers.unknown:
            lines.append(
                f"docker could not be asked for containers of this run on {', '.join(self.containers.unknown)}; once "
                "it answers, pdserve down clears up"
            )
        return lines


async def clear_containers(plan: Plan, state: DeploymentState, run: RunDir, *, lost_only: bool) -> ClearedContainers:
    """Stop what still runs in containers of a run, as far as this machine can reach it. Then remove their shared memory
    that no living process uses. `lost_only`: on other nodes only where the agent was lost; all others have removed
    theirs."""
    there = _reachable(plan, state)
    containers = await stop_left_containers(there, run.run_id)
    unknown = {text.partition(" ")[0] for text in containers.unknown}
    # Of a container that may run nothing is known to be left.
    known = [node for node in there if node.name not in unknown]
    far = [node for node in known if not _is_here(node, state) and _shares_memory(node)]
    if lost_only:
        far = [node for node in far if (agent := state.nodes.get(node.name)) is not None and agent.lost]
    removed = await asyncio.gather(*(asyncio.to_thread(_remove_there, node, run) for node in far))
    for node in known:
        if _is_here(node, state) and _shares_memory(node):
            removed.append(ShmLedger(ledger_file(run.path, node.name)).remove_orphans())
    return ClearedContainers(
        containers, tuple(name for names in removed for name in names), tuple(node.name for node in known)
    )


def _remove_there(node: Node, run: RunDir) -> list[str]:
    argv = ("-m", "pdserve.node.left_memory", "--run-dir", str(run.path), "--node", node.name)
    return run_in_container(node, argv, _REMOVE_SECONDS).out.splitlines()


async def left_of(plan: Plan, state: DeploymentState, run: RunDir) -> tuple[str, ...]:
    """Return `ID on NODE` of the containers of a run that still run, as far as they can be seen from this machine."""
    return (await left_containers(_reachable(plan, state), run.run_id)).names


def _reachable(plan: Plan, state: DeploymentState) -> list[Node]:
    """Return nodes in docker, each by the way that leads there from here: this machine's own docker needs none."""
    here = [node.model_copy(update={"reach": Local()}) for node in plan.nodes if _is_here(node, state)]
    names = {node.name for node in here}
    far = [node for node in plan.nodes if node.name not in names] if is_named_here(state.host) else []
    return [node for node in (*here, *far) if in_docker(node)]


def _is_here(node: Node, state: DeploymentState) -> bool:
    """Return whether that is this machine. A container of docker that shares the node's network has the node's name."""
    if isinstance(node.reach, Local):
        return is_named_here(state.host)
    known = state.nodes.get(node.name)
    hostname = node.hostname if known is None else known.hostname
    return hostname is not None and is_named_here(hostname)


def _shares_memory(node: Node) -> bool:
    """Tell whether the /dev/shm of a node's container is the node's. One of its own has gone with the container."""
    return "--ipc=host" in node.command
