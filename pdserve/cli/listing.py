"""`pdserve list`"""

from __future__ import annotations

import json
import os

import typer

from pdserve.errors import NotOursError, StateError
from pdserve.printable import printable, size_text
from pdserve.run.directory import RunDir, deployments, home, phase_now
from pdserve.run.retention import RemovedRun, prune_all


def _phase_now(run_dir: RunDir) -> dict[str, str]:
    try:
        state = run_dir.read_state()
    except (StateError, NotOursError):
        return {"phase": "unreadable", "endpoint": ""}
    return {"phase": phase_now(run_dir, state), "endpoint": state.endpoint}


def run(*, as_json: bool) -> None:
    """Print one line for each deployment that was ever started: name, what it is now, where it answers, where it is
    recorded."""
    rows = []
    for run_dir in deployments(home(os.environ)):
        rows.append({"name": run_dir.path.parent.name, **_phase_now(run_dir), "run": str(run_dir.path)})
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    for row in rows:
        typer.echo(printable(f"{row['name']:<24} {row['phase']:<12} {row['endpoint'] or '-':<28} {row['run']}"))
    if not rows:
        typer.echo("no deployments")


def prune(*, as_json: bool, dry_run: bool) -> None:
    """Remove old runs and print one line for each, or for each that would be removed; exit 8 when one could not be."""
    removed = prune_all(home(os.environ), dry_run=dry_run)
    if as_json:
        typer.echo(json.dumps([_row(run, dry_run=dry_run) for run in removed], indent=2))
    else:
        for run in removed:
            if run.problem is None:
                done = "would remove" if dry_run else "removed"
                typer.echo(printable(f"{done} {run.path} {size_text(run.size)}"))
            else:
                typer.echo(printable(f"left {run.path}: {run.problem}"), err=True)
        gone = [run for run in removed if run.problem is None]
        size = size_text(sum(run.size for run in gone))
        typer.echo(f"{len(gone)} old run(s), {size}" if gone else "no old runs")
    if any(run.problem is not None for run in removed):
        raise typer.Exit(StateError.exit_code)


def _row(run: RemovedRun, *, dry_run: bool) -> dict[str, str | int | bool | None]:
    return {
        "run": str(run.path),
        "bytes": run.size,
        "removed": run.problem is None and not dry_run,
        "problem": run.problem,
    }
