"""`pdserve up`"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import typer

from pdserve.cli.console import Console
from pdserve.cli.options import check_place_options
from pdserve.cli.shown_plan import show_plan
from pdserve.operations.look import choose_destination
from pdserve.operations.plan_recipe import load, recipe_words
from pdserve.operations.shown_change import change_there
from pdserve.operations.up import UpOptions, dry_run, recorded_recipe, up
from pdserve.printable import printable
from pdserve.run.directory import home


def run(
    recipe: Path | None,
    set_: Sequence[str],
    unset: Sequence[str],
    options: UpOptions,
    *,
    dry: bool,
    as_json: bool,
    cluster: Path | None,
    this_machine: bool,
) -> None:
    """Raises what `operations.up` does."""
    check_place_options(cluster, this_machine=this_machine)
    if as_json and not dry:
        raise typer.BadParameter("--json belongs to --dry-run")
    loaded = load(recipe or recorded_recipe(home(os.environ)), set_, unset)
    words = recipe_words(loaded.path, set_, unset)
    there = choose_destination(loaded, cluster, this_machine=this_machine, words=words)
    if dry:
        plan, change = change_there(loaded, there, _progress) or (dry_run(loaded, there, _progress).plan, None)
        show_plan(plan, change, as_json=as_json, replace=options.replace)
        return
    up(loaded, there, Console(), options)


def _progress(line: str) -> None:
    """Beside the plan on stdout."""
    typer.echo(printable(line), err=True)
