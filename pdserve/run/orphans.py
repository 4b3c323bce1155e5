"""Find and end what still runs of a deployment whose supervisors are gone, by its recorded PIDs and start times.

Normally nothing: agents stop their processes when the launcher dies, guards when the agent dies. If all of them were
killed at once (a process group, the OOM killer), this is what is left to clear up with.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from pdserve.node import agent_record
from pdserve.node.agent_record import AgentRecord, ledger_file
from pdserve.run.directory import RunDir
from pdserve.run.state import DeploymentState
from pdserve.system import cgroup, process, procfs
from pdserve.system.host import is_here, is_named_here
from pdserve.system.process import send, stop_family
from pdserve.system.procfs import ProcessId
from pdserve.system.shared_memory import ShmLedger

COMMAND = "the command"
"""Of `pdserve run`: its name among the processes, none of which can have it."""
_GRACE_SECONDS = 5.0
_LOOK_SECONDS = 0.2
_HELD_SECONDS = 2.0
"""What a stopped supervisor gets after a SIGCONT."""
_ENDED = ("dead", "done", "stopped")
_CLOCK_SECONDS = 2.0
"""By which two accounts of when something happened may differ."""


def recorded_processes(state: DeploymentState) -> dict[str, ProcessId]:
    """Return every process of the record that is on this machine, supervisors last. Another machine's PIDs mean nothing
    here: there the agents' leases end what is left."""
    nodes = {node: agents for node, agents in state.nodes.items() if is_here(agents.hostname, agents.place)}
    processes = {
        name: process.id
        for name, process in state.processes.items()
        if process.id is not None and process.node in nodes
    }
    if state.command is not None and is_here(state.host, state.place):
        processes[COMMAND] = state.command
    for node, agents in nodes.items():
        processes[f"agent@{node}"] = agents.agent
        processes[f"guard@{node}"] = agents.guard
    return processes


def members(state: DeploymentState, run: RunDir) -> set[int]:
    """Return the live PIDs on this machine that belong to a run: recorded processes, their families, who is in a cgroup
    of the run, and, where neither a guard nor a cgroup shows all of it, who carries its token in the environment.

    A session whose leader is dead may be a stranger's: the kernel gives a number again once it is free. Its members are
    ours if they began before the leader died, or, where that was not seen, before the run was last heard of. A PID of
    another process is never among them, nor is PID 1, the caller, or a process above it, whatever the record has.
    """
    inside = {pid for group in _cgroups(state, run) for pid in group.members()}
    seen = procfs.relations()
    known = recorded_processes(state)
    # One that has ended and was not waited for, as where a container's PID 1 waits for nobody, still has its session.
    roots = {identity.pid for identity in known.values() if procfs.identify(identity.pid) == identity}
    heard = _last_heard_of(run)
    for name, identity in known.items():
        # Session 1, as 0, is that of what every process descends from.
        if identity.pid > 1 and procfs.identify(identity.pid) is None:
            process = state.processes.get(name)
            # One that was restarted since has the time of an earlier end, and another root.
            died_at = process.died_at if process is not None and process.phase in _ENDED else None
            until = heard if died_at is None else died_at
            roots |= {
                each.pid
                for each in procfs.identities(pid for pid, of in seen.items() if of.session == identity.pid)
                if procfs.started_at(each) <= until + _CLOCK_SECONDS
            }
    never = procfs.ancestry(os.getpid(), seen)
    family = procfs.family((roots | inside) - never, seen=seen)
    # Also without a recorded PID: its launcher may have ended before it wrote it.
    return (family | procfs.family(_token_bearers(state, run) - never, seen=seen)) - never


def _token_bearers(state: DeploymentState, run: RunDir) -> set[int]:
    """Return the live PIDs that carry the token of the run. None where a guard lives, or its processes have cgroups:
    all that the run has started is known without it, and of a guard that has left by itself nothing is left. Another
    process with the token has a copied environment."""
    agents = _agents(state, run)
    here = [agent for agent in agents if agent.here]
    beside = [agent for agent in agents if not agent.here and is_named_here(agent.hostname)]
    if here and not beside and all(agent.shows_all() for agent in here):
        return set()
    return process.holders(run.run_id, state.token)


def _agents(state: DeploymentState, run: RunDir) -> list[AgentRecord]:
    """Return all agents that the run has had, as far as they are recorded by themselves or by the launcher."""
    reported = [
        AgentRecord(guard=node.guard, hostname=node.hostname, place=node.place, cgroup=node.cgroup)
        for node in state.nodes.values()
    ]
    own = agent_record.records(run.path)
    noted = {agent.guard for agent in own}
    return [*own, *(agent for agent in reported if agent.guard not in noted)]


def _cgroups(state: DeploymentState, run: RunDir) -> list[cgroup.Cgroup]:
    """Return the run's cgroups on this machine, as far as they are still there."""
    here = {agent.cgroup for agent in _agents(state, run) if agent.here}
    return [group for each in here if (group := cgroup.find_recorded_cgroup(each, run.run_id)) is not None]


def _remove_empty_cgroups(state: DeploymentState, run: RunDir) -> None:
    """Remove cgroups once all that was in them has ended, supervisors and processes. Only while no supervisor lives."""
    for group in _cgroups(state, run):
        group.remove()


def _last_heard_of(run: RunDir) -> float:
    """Return when a run's launcher last wrote anything; 0: it has left nothing."""
    times = [file.stat().st_mtime for file in (run.beat, run.state) if file.exists()]
    return max(times, default=0.0)


def has_supervisor(state: DeploymentState) -> bool:
    """Return whether an agent or a guard lives here: then it is clearing up, if its launcher is gone."""
    return any(supervisor.alive() for supervisor in _supervisors(state).values())


def _supervisors(state: DeploymentState) -> dict[str, ProcessId]:
    return {
        name: supervisor
        for name, supervisor in recorded_processes(state).items()
        if name.startswith(("agent@", "guard@"))
    }


@asynccontextmanager
async def resume_stopped_supervisors(state: DeploymentState, report: Callable[[str], None]) -> AsyncIterator[None]:
    """Let no agent and no guard of this machine stand still (SIGSTOP, a debugger) while the block runs: they stop what
    is left, and it would wait for them. One gets a SIGCONT; one that does not is killed, and then the other one of the
    two does its work, or `stop_left`."""
    watch = asyncio.create_task(_resume_loop(state, report))
    try:
        yield
    finally:
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)


async def _resume_loop(state: DeploymentState, report: Callable[[str], None]) -> None:
    signalled_at: dict[str, float] = {}
    while True:
        now = asyncio.get_running_loop().time()
        for name, supervisor in _supervisors(state).items():
            if not procfs.is_stopped(supervisor):
                signalled_at.pop(name, None)
            elif name not in signalled_at:
                signalled_at[name] = now
                if send(supervisor, signal.SIGCONT):
                    report(f"{name} (PID {supervisor.pid}) was stopped (SIGSTOP); sent SIGCONT")
            elif now - signalled_at[name] >= _HELD_SECONDS:
                signalled_at[name] = now
                if send(supervisor, signal.SIGKILL):
                    report(f"{name} (PID {supervisor.pid}) stayed stopped (a debugger?); killed")
        await asyncio.sleep(_LOOK_SECONDS)


def may_be_busy(state: DeploymentState, run: RunDir, node: str) -> bool:
    """Return whether anything of a node whose guard was not seen leaving may still run: False where this machine shows
    that nothing of the run is left."""
    known = state.nodes.get(node)
    return known is None or not is_here(known.hostname, known.place) or bool(members(state, run))


def list_living(state: DeploymentState, run: RunDir) -> list[str]:
    """Return `name PID command` of every process of the run that lives here; members that were not recorded have no
    name."""
    names = {identity.pid: name for name, identity in recorded_processes(state).items() if identity.alive()}
    return [
        f"{names.get(pid, 'of its processes:')} PID {pid} {procfs.command(pid)[:100]}"
        for pid in sorted(members(state, run))
    ]


async def stop_left(state: DeploymentState, run: RunDir) -> str:
    """Stop all `members`, and remove their cgroups. Remove the run's recorded shared memory on this machine, also when
    none of its owners lives. Returns what became of members that lived; empty: none did."""
    ledgers = [
        ShmLedger(ledger_file(run.path, node))
        for node, agents in state.nodes.items()
        if is_here(agents.hostname, agents.place)
    ]
    left = members(state, run)
    if left:
        for ledger in ledgers:
            ledger.record(left)
        await stop_family(lambda: members(state, run), orphan_grace=_GRACE_SECONDS, cgroups=_cgroups(state, run))
    else:
        _remove_empty_cgroups(state, run)
    for ledger in ledgers:
        ledger.remove_orphans()
    if stuck := list_living(state, run):
        return f"{len(stuck)} process(es) cannot be stopped (another user's, or held in the kernel): {'; '.join(stuck)}"
    return "what its agents had left was stopped by the launcher" if left else ""
