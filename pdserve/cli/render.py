"""`pdserve render`"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import typer

from pdserve.operations.plan_recipe import batch_script, load, plan_for, recipe_words
from pdserve.operations.shown_agents import with_shown_agents
from pdserve.plan.render.bash import render_shell


def run(recipe: Path, set_: Sequence[str], unset: Sequence[str], *, as_json: bool, slurm: bool) -> None:
    """Prints the plan for nodes of the recipe's own kind."""
    if as_json and slurm:
        raise typer.BadParameter("--slurm is a script and --json the plan: give one of them")
    planned = plan_for(load(recipe, set_, unset), None, run_dir=f"run-{recipe.stem}", run_id="rendered")
    if not slurm:
        planned = with_shown_agents(planned)
    for warning in dict.fromkeys([*planned.loaded.warnings, *planned.plan.warnings]):
        typer.echo(f"warning: {warning}", err=True)
    if as_json:
        typer.echo(planned.plan.model_dump_json(indent=2))
    else:
        words = recipe_words(recipe, set_, unset)
        typer.echo(batch_script(planned, words) if slurm else render_shell(planned.plan), nl=False)
