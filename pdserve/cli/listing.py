"""`pdserve list`"""

from __future__ import annotations

import json
import os

import typer

from pdserve.errors import StateError
from pdserve.rundir import RunDir, deployments, home, lives


def _now(found: RunDir) -> dict[str, str]:
    try:
        state = found.read_state()
    except StateError:
        return {"phase": "unreadable", "endpoint": ""}
    known = lives(found, state) or state.phase in ("stopped", "failed")
    return {"phase": state.phase if known else "lost", "endpoint": state.endpoint}


def run(*, as_json: bool) -> None:
    """One line a deployment that was ever started: name, what it is now, where it answers, where it is recorded."""
    rows = []
    for found in deployments(home(os.environ)):
        rows.append({"name": found.path.parent.name, **_now(found), "run": str(found.path)})
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    for row in rows:
        typer.echo(f"{row['name']:<24} {row['phase']:<10} {row['endpoint'] or '-':<28} {row['run']}")
    if not rows:
        typer.echo("no deployments")
