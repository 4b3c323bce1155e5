"""`pdserve restart`"""

from __future__ import annotations

import os

import typer

from pdserve.errors import StateError
from pdserve.run.directory import find, home, lives
from pdserve.run.inbox import Restart, ask


def run(process: str, name: str | None) -> None:
    """Raises StateError; exits with the launcher's own code when the process does not come back."""
    found = find(home(os.environ), name)
    state, timeouts = found.read_state(), found.read_plan().timeouts
    if not lives(found, state):
        raise StateError(f"{state.name} is not running", todo="pdserve up")
    seconds = 2 * (timeouts.engine_seconds + timeouts.stop_seconds + timeouts.attach_seconds)
    reply = ask(found, Restart(name=process), seconds=seconds, alive=lambda: lives(found, found.read_state()))
    if reply.exit_code:
        typer.echo(f"error: {reply.message}", err=True)
        raise typer.Exit(reply.exit_code)
    typer.echo(reply.message)
