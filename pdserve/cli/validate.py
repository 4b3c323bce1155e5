"""`pdserve validate`"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import typer

from pdserve.operations.plan_recipe import check_job, load, plan_for


def run(recipe: Path, set_: Sequence[str], unset: Sequence[str], *, online: bool = False) -> None:
    """Prints a summary of what would run; warnings go to stderr. Raises RecipeError."""
    planned = plan_for(load(recipe, set_, unset), None, run_dir="RUN_DIR", run_id="RUN_ID", online=online)
    check_job(planned)
    for warning in dict.fromkeys([*planned.loaded.warnings, *planned.plan.warnings]):
        typer.echo(f"warning: {warning}", err=True)
    plan = planned.plan
    typer.echo(f"{recipe}: valid. {plan.name} ({plan.mode}, {plan.platform}) on {len(plan.nodes)} node(s):")
    for process in plan.processes:
        devices = f"  devices {','.join(map(str, process.devices))}" if process.devices else ""
        ports = " ".join(f"{purpose}:{port}" for purpose, port in process.ports.items())
        typer.echo(f"  {process.name:<14} {process.node:<10} {ports}{devices}")
