"""`pdserve render`"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import typer

from pdserve.cli.shown_plan import show_plan
from pdserve.operations.plan_recipe import batch_script, load, plan_for, recipe_words
from pdserve.operations.shown_change import change_on_paper, with_shown_agents


def run(recipe: Path, set_: Sequence[str], unset: Sequence[str], *, as_json: bool, slurm: bool) -> None:
    """Prints the plan for nodes of the recipe's own kind; beside a deployment that runs, the one that it would get. A
    batch script is for another deployment anyway."""
    if as_json and slurm:
        raise typer.BadParameter("--slurm is a script and --json the plan: give one of them")
    loaded = load(recipe, set_, unset)
    changed = None if slurm else change_on_paper(loaded)
    if changed is not None:
        plan, change = changed
    else:
        planned, change = plan_for(loaded, None, run_dir=f"run-{recipe.stem}", run_id="rendered"), None
        plan = planned.plan if slurm else with_shown_agents(planned).plan
    for warning in dict.fromkeys([*loaded.warnings, *plan.warnings]):
        typer.echo(f"warning: {warning}", err=True)
    if slurm:
        typer.echo(batch_script(planned, recipe_words(recipe, set_, unset)), nl=False)
    else:
        show_plan(plan, change, as_json=as_json)
