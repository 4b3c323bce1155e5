"""`pdserve down`"""

from __future__ import annotations

import asyncio
import contextlib
import os

import typer

from pdserve.control import Down, ask
from pdserve.errors import StateError
from pdserve.host import is_here
from pdserve.leftovers import living, stop_left
from pdserve.process import pid_end
from pdserve.rundir import RunDir, find, home, lives
from pdserve.state import DeploymentState

_DOWN_SECONDS = 300.0
_SUPERVISORS_SECONDS = 60.0


def run(name: str | None) -> None:
    """Raises StateError when there is nothing to stop, or something of it cannot be stopped."""
    found = find(home(os.environ), name)
    state = found.read_state()
    if lives(found, state):
        ask(found, Down(), seconds=_DOWN_SECONDS, alive=lambda: lives(found, found.read_state()))
        if is_here(state.host):
            asyncio.run(pid_end(state.launcher.pid))
        typer.echo(f"{state.name}: stopped")
        return
    if living(state):
        typer.echo(f"{state.name}: its launcher is gone; clearing up what it left")
        asyncio.run(_clear(state, found))
        if left := living(state):
            raise StateError(
                f"some processes of {state.name} cannot be stopped",
                where=str(found.path),
                cause="they belong to another user, or wait for a device in the kernel",
                evidence=tuple(left),
            )
        typer.echo(f"{state.name}: stopped")
        return
    typer.echo(f"{state.name}: not running")
    for name, node in state.nodes.items():
        if node.lost and not is_here(node.hostname):
            typer.echo(f"{name} was lost: the same typed there clears up what an agent that was killed may have left")


async def _clear(state: DeploymentState, run: RunDir) -> None:
    """Supervisors that still live are doing it already; what they do not do in time is done here."""
    here = [node for node in state.nodes.values() if is_here(node.hostname)]
    waits = (pid_end(one.pid) for node in here for one in (node.agent, node.guard) if one.alive())
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(asyncio.gather(*waits), _SUPERVISORS_SECONDS)
    await stop_left(state, run)
