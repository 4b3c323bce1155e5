"""`pdserve down`"""

from __future__ import annotations

import asyncio
import os

import typer

from pdserve.control import Down, ask
from pdserve.errors import StateError
from pdserve.leftovers import living
from pdserve.process import pid_end
from pdserve.rundir import find, home

_DOWN_SECONDS = 300.0


def run(name: str | None) -> None:
    """Raises StateError when there is nothing to stop, or something of it cannot be stopped."""
    found = find(home(os.environ), name)
    state = found.read_state()
    if state.launcher.alive():
        ask(found, Down(), seconds=_DOWN_SECONDS, alive=state.launcher.alive)
        asyncio.run(pid_end(state.launcher.pid))
        typer.echo(f"{state.name}: stopped")
        return
    if left := living(state):
        raise StateError(
            f"the launcher of {state.name} is gone, but some of its processes still run",
            where=str(found.path),
            cause="their agent or its guard is stopping them at this moment",
            todo="try again in a few seconds",
            evidence=tuple(left),
        )
    typer.echo(f"{state.name}: not running")
