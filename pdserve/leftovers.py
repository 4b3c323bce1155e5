"""What still runs of a deployment whose supervisors are gone, from its recorded PIDs and start times, and its end.

Normally nothing: agents stop their processes when the launcher dies, guards when the agent dies. If all of them were
killed at once (a process group, the OOM killer), this is what is left to clear up with.
"""

from __future__ import annotations

from pdserve import procfs
from pdserve.host import is_here
from pdserve.process import MARKER, stop_family
from pdserve.procfs import ProcessId
from pdserve.rundir import RunDir
from pdserve.shm import ShmLedger
from pdserve.state import DeploymentState

_GRACE_SECONDS = 5.0


def recorded(state: DeploymentState) -> dict[str, ProcessId]:
    """Every process of the record that is on this machine, supervisors last. Another machine's PIDs mean nothing here:
    there the agents' leases end what is left."""
    nodes = {node: agents for node, agents in state.nodes.items() if is_here(agents.hostname)}
    found = {
        name: process.id
        for name, process in state.processes.items()
        if process.id is not None and process.node in nodes
    }
    for node, agents in nodes.items():
        found[f"agent@{node}"] = agents.agent
        found[f"guard@{node}"] = agents.guard
    return found


def living(state: DeploymentState) -> list[str]:
    """`name PID command` of every recorded process that is exactly the one that we started and still lives."""
    return [
        f"{name} PID {one.pid} {procfs.command(one.pid)[:100]}" for name, one in recorded(state).items() if one.alive()
    ]


async def stop_left(state: DeploymentState, run: RunDir) -> bool:
    """Stops recorded processes and their families, and removes their shared memory. True if there was anything.

    A PID that now belongs to somebody else is never touched. A dead root still names its session: the kernel gives
    its number to nobody while a member lives.
    """
    roots = {one.pid: one for one in recorded(state).values()}
    markers = [f"{MARKER}={run.run_id}/{name}".encode() for name in state.processes]

    def members() -> set[int]:
        ours = {pid for pid, one in roots.items() if procfs.identify(pid) in (None, one)}
        return set().union(*(procfs.family(ours, marker=marker) for marker in markers)) if ours else set()

    if not (left := members()):
        return False
    ledgers = [ShmLedger(run.path / f"shm@{node}.json") for node in state.nodes]
    for ledger in ledgers:
        ledger.record(left)
    await stop_family(members, orphan_grace=_GRACE_SECONDS)
    for ledger in ledgers:
        ledger.remove_orphans()
    return True
