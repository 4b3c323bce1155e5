"""`pdserve list`"""

from __future__ import annotations

import json
import os

import typer

from pdserve.rundir import deployments, home


def run(*, as_json: bool) -> None:
    """One line a deployment that was ever started: name, what it is now, where it answers, where it is recorded."""
    rows = []
    for found in deployments(home(os.environ)):
        state = found.read_state()
        phase = state.phase if state.launcher.alive() or state.phase in ("stopped", "failed") else "lost"
        rows.append({"name": state.name, "phase": phase, "endpoint": state.endpoint, "run": str(found.path)})
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    for row in rows:
        typer.echo(f"{row['name']:<24} {row['phase']:<9} {row['endpoint'] or '-':<28} {row['run']}")
    if not rows:
        typer.echo("no deployments")
