"""`pdserve down`: stops a deployment, by its launcher or, where that is dead, by its record."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Collection

from pdserve.errors import NotOursError, ReportedError, StateError
from pdserve.plan.time_limits import down_seconds
from pdserve.run.containers import ClearedContainers, clear_containers
from pdserve.run.directory import (
    LIVES_SECONDS,
    RunDir,
    check_no_launcher,
    find,
    has_living_launcher,
    home,
    seconds_unheard,
)
from pdserve.run.inbox import Down, NotAskedError, ask
from pdserve.run.orphans import list_living, resume_stopped_supervisors, stop_left
from pdserve.run.retention import remove_empty_cgroups
from pdserve.run.state import DeploymentState
from pdserve.system.host import is_beside, is_here, is_named_here
from pdserve.system.process import process_end, send
from pdserve.system.procfs import is_stopped
from pdserve.time_limit import time_limit

_DOWN_SECONDS = 300.0
"""An answer, or an end, is waited for so long where the plan cannot be read."""
_OVER = ("stopped", "failed")


Report = Callable[[str], None]
"""Gets one line."""


def down(name: str | None, report: Report) -> None:
    """Stop a deployment. Raises StateError when there is nothing to stop, or something of it cannot be stopped, and
    ReportedError with the launcher's own exit code."""
    run = find(home(os.environ), name)
    state = run.read_state()
    if has_living_launcher(run, state) and _stop_by_launcher(run, state, report):
        return
    state = run.read_state()
    if is_here(state.host, state.place) or is_named_here(state.host):
        # Who holds it may live in another PID namespace: its processes, key and memory are not left over.
        check_no_launcher(run.path.parent.parent, run.path.parent.name)
        run.forget_key()
    cleared = _clear_containers(run, state, report)
    if list_living(state, run):
        report(f"{state.name}: its launcher is gone; clearing up what it left")
        asyncio.run(clear_up(state, run, report))
        if left := list_living(state, run):
            raise StateError(
                f"some processes of {state.name} cannot be stopped",
                where=str(run.path),
                cause="they belong to another user, or wait for a device in the kernel",
                evidence=tuple(left),
            )
        report(f"{state.name}: stopped")
    else:
        asyncio.run(stop_left(state, run))
        report(f"{state.name}: {'stopped' if cleared.containers.names else 'not running'}")
    remove_empty_cgroups(run.path.parent)
    _report_other_nodes(run, state, report, cleared=cleared.nodes)
    if cleared.containers.unknown and (state.phase not in _OVER or any(node.lost for node in state.nodes.values())):
        raise StateError(
            f"docker does not answer on {', '.join(cleared.containers.unknown)}",
            where=str(run.path),
            cause="containers of this deployment may still run there; their agents stop what is in them once their "
            f"pipe is closed, at the latest {run.read_plan().timeouts.agent_lease_seconds:g} s after it",
            todo="start docker there (systemctl start docker), then the same again",
        )


def _clear_containers(run: RunDir, state: DeploymentState, report: Report) -> ClearedContainers:
    """Stop the containers of a run. Where the plan cannot be read, no container of it is known, and nothing is done."""
    try:
        plan = run.read_plan()
    except StateError:
        return ClearedContainers()
    cleared = asyncio.run(clear_containers(plan, state, run, lost_only=False))
    if cleared.containers.names:
        report(f"{state.name}: its launcher is gone; stopped the containers {', '.join(cleared.containers.names)}")
    return cleared


def _stop_by_launcher(run: RunDir, state: DeploymentState, report: Report) -> bool:
    """Ask the launcher to stop everything; False when it turns out to be gone, or is gone after a signal."""
    if is_here(state.host, state.place) and is_stopped(state.launcher) and send(state.launcher, signal.SIGCONT):
        # As an agent or a guard that stands still in a stop: only it knows all that is to be stopped.
        report(f"{state.name}: its launcher (PID {state.launcher.pid}) stood still (SIGSTOP) and got a SIGCONT")
    elif (late := lateness(run, state)) is not None:
        report(f"{state.name}: {late}")
    try:
        reply = ask(run, Down(), seconds=_patience(run), alive=lambda: has_living_launcher(run, run.read_state()))
    except NotAskedError as error:
        if not is_here(state.host, state.place) or not send(state.launcher, signal.SIGTERM):
            raise
        # To stop needs no free byte.
        report(f"{state.name}: {error.what} ({error.cause}); its launcher gets a SIGTERM")
        asyncio.run(process_end(state.launcher))
        return False
    except StateError:
        if has_living_launcher(run, run.read_state()):
            raise
        return False
    if is_here(state.host, state.place):
        asyncio.run(process_end(state.launcher))
    if reply.exit_code:
        raise ReportedError(reply.message, reply.exit_code)
    report(f"{state.name}: {reply.message}")
    return True


def _patience(run: RunDir) -> float:
    """Return the seconds that a run's launcher may take to stop everything, and its agents without it."""
    try:
        return down_seconds(run.read_plan())
    except (StateError, NotOursError):
        return _DOWN_SECONDS


def lateness(run: RunDir, state: DeploymentState) -> str | None:
    """Return why a launcher that counts as living may not answer, and how long the wait for it is; None: it is heard.

    On its own machine silence ends nothing, because the process is there to be seen.
    """
    if (late := seconds_unheard(run)) is None:
        return None
    if is_here(state.host, state.place):
        return (
            f"its launcher (PID {state.launcher.pid}) was not heard for {late:.0f} s; waiting up to "
            f"{_patience(run):.0f} s for its answer"
        )
    return (
        f"its launcher on {state.host} was not heard for {late:.0f} s; waiting for it, until it answers or was not "
        f"heard for {LIVES_SECONDS:.0f} s"
    )


def _report_other_nodes(run: RunDir, state: DeploymentState, report: Report, *, cleared: Collection[str] = ()) -> None:
    """Report on other nodes, which this machine cannot see. `cleared`: nodes whose containers it could see."""
    for node, known in state.nodes.items():
        # Under this name, but of no other container: of an earlier boot, and ended with it.
        named = is_named_here(known.hostname) and not is_beside(known.hostname, known.place)
        if named or node in cleared or is_here(known.hostname, known.place):
            # The record may be gone or another user's: the hint then stays, which does no harm.
            with contextlib.suppress(OSError):
                run.write(run.cleared(node), "")
    there = {
        node: known
        for node, known in state.nodes.items()
        if not is_here(known.hostname, known.place) and node not in cleared and not run.cleared(node).exists()
    }
    over = state.phase in _OVER
    if beside := [node for node, known in there.items() if is_beside(known.hostname, known.place)]:
        if any(there[node].lost or not over for node in beside):
            report(
                f"{', '.join(beside)}: in another container (PID namespace) of this machine, and nothing was signalled "
                f"there; if it still runs, run `pdserve down {state.name}` in that container, or stop it"
            )
        there = {node: known for node, known in there.items() if node not in beside}
    for node, known in there.items():
        if known.lost:
            report(f"{node} was lost: run `pdserve down {state.name}` there to remove what a killed agent has left")
    if (rest := [node for node, known in there.items() if not known.lost]) and not over:
        report(
            f"its launcher on {state.host} was gone before it could stop anything: the agents of {', '.join(rest)} "
            f"stop what runs there by themselves{_at_the_latest(run)}"
        )


def _at_the_latest(run: RunDir) -> str:
    """Say when the agents of a run stop by themselves; empty where the plan cannot be read."""
    try:
        return f", at the latest {run.read_plan().timeouts.agent_lease_seconds:g} s after it"
    except (StateError, NotOursError):
        return ""


async def clear_up(state: DeploymentState, run: RunDir, report: Report) -> None:
    """Stop what a launcher that is gone has left here. Supervisors that still live are doing it already; what they do
    not do in time is done here."""
    here = [node for node in state.nodes.values() if is_here(node.hostname, node.place)]
    waits = (process_end(supervisor) for node in here for supervisor in (node.agent, node.guard) if supervisor.alive())
    async with resume_stopped_supervisors(state, lambda line: report(f"{state.name}: {line}")):
        with contextlib.suppress(TimeoutError):
            async with time_limit(_patience(run)):
                await asyncio.gather(*waits)
    await stop_left(state, run)
