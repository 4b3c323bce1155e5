"""`pdserve render`"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import typer

from pdserve.cli.plan_recipe import load, plan_for
from pdserve.plan.render import render_shell


def run(recipe: Path, set_: Sequence[str], unset: Sequence[str], *, as_json: bool) -> None:
    """Prints the plan for nodes of the recipe's own kind."""
    planned = plan_for(load(recipe, set_, unset), None, run_dir=f"run-{recipe.stem}", run_id="rendered")
    for warning in dict.fromkeys([*planned.loaded.warnings, *planned.plan.warnings]):
        typer.echo(f"warning: {warning}", err=True)
    typer.echo(planned.plan.model_dump_json(indent=2) if as_json else render_shell(planned.plan), nl=as_json)
