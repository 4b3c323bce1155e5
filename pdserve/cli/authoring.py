"""`pdserve init` and `import`. Apart from verbs/recipe.py for a fast --help."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import typer

from pdserve.importing.launch import Draft, ImportChoice
from pdserve.importing.recipe_text import line
from pdserve.operations import import_recipe
from pdserve.operations.import_recipe import save
from pdserve.operations.init_recipe import first_recipe
from pdserve.starter.draft import HARDWARE
from pdserve.starter.goal import Goal
from pdserve.sweep import imported


def variables(texts: Sequence[str]) -> dict[str, str]:
    """Read several `NAME=VALUE`. Raises BadParameter."""
    for text in texts:
        if not text.partition("=")[0].isidentifier() or "=" not in text:
            raise typer.BadParameter(f"--var {text}: write --var NAME=VALUE")
    return {name: value for name, _, value in (text.partition("=") for text in texts)}


def run_import(file: Path, out: Path | None, choice: ImportChoice) -> None:
    """Prints the recipe, or writes it to `out`; what was not carried over goes to stderr. Raises RecipeError, and
    SourceDifferenceError for an import in part."""
    recipe = import_recipe.import_file(file, choice)
    if out is None:
        typer.echo(recipe.text, nl=False)
    else:
        import_recipe.save(recipe.text, out)
    _warn([recipe])
    _report(recipe.draft, out)
    import_recipe.check_whole(recipe, file)


def import_sweep(file: Path, out: Path, sweep: Path) -> None:
    """Writes a recipe and a sweep file over it; what was not carried over goes to stderr. Raises RecipeError, and
    SourceDifferenceError for an import in part."""
    made = imported.import_sweep(file, out, sweep, os.environ)
    imported.write_sweep(made, out, sweep)
    _warn([import_recipe.ImportedRecipe(made.recipe, made.draft.recipe, loaded) for loaded in made.recipes])
    for note in made.draft.notes:
        if note.effect == "confirm":
            typer.echo(f"please confirm: {line(note)}", err=True)
    _report(made.draft.recipe, out)
    deployments = len(made.draft.deployments)
    typer.echo(f"{sweep}: {made.points} points on {deployments} deployments; next: pdserve sweep {sweep} --dry-run")
    imported.check_whole(made, file)


def check_recipe(recipe: Path, file: Path, choice: ImportChoice) -> None:
    """Prints that the recipe is what the file describes. Raises SourceDifferenceError where it departs."""
    import_recipe.compare(recipe, file, choice)
    typer.echo(f"{recipe}: what {file} describes")


def _warn(recipes: Sequence[import_recipe.ImportedRecipe]) -> None:
    """Print each warning once: those of the recipes, and of the versions that the file names."""
    texts = [_without_line(warning) for recipe in recipes for warning in recipe.loaded.warnings]
    texts += [hazard for recipe in recipes for hazard in import_recipe.version_hazards(recipe)]
    for text in dict.fromkeys(texts):
        typer.echo(f"warning: {text}", err=True)


def _without_line(warning: str) -> str:
    """Return a warning without its place. The recipe was read from a file that is not there any more. What a point of a
    sweep has set is its own place."""
    return warning if warning.startswith("--set ") else warning.partition(": ")[2]


def _report(draft: Draft, out: Path | None) -> None:
    for note in draft.notes:
        if note.effect == "confirm":
            typer.echo(f"please confirm: {line(note)}", err=True)
    others = sum(note.effect in ("replaced", "unused") for note in draft.notes)
    where = "the recipe" if out is None else str(out)
    typer.echo(f"{draft.file} ({draft.format}): the first lines of {where} list {others} further values", err=True)


def run_init(
    model: str | None, hardware: str | None, nodes: int, devices: int | None, goal: Goal, out: Path | None
) -> None:
    """Prints the recipe, or writes it to `out`; what the planner objects to goes to stderr. Raises RecipeError."""
    model = _option_or_answer(model, "--model", "a folder, or an id of the hub as Qwen/Qwen3-8B")
    hardware = _option_or_answer(hardware, "--hardware", ", ".join(HARDWARE))
    made = first_recipe(model, hardware, nodes=nodes, devices=devices, goal=goal)
    if out is None:
        typer.echo(made.text, nl=False)
    else:
        save(made.text, out)
    for warning in made.warnings:
        typer.echo(f"warning: {warning}", err=True)
    for crossing in made.crossings:
        typer.echo(f"{crossing.severity}: {crossing.where}: {crossing.what}", err=True)
        typer.echo(f"  what to do: {crossing.todo}", err=True)
    if not made.checked:
        typer.echo(
            f"warning: nothing was checked against the memory of {hardware}: config.json and weights of {model} are "
            "not on this machine, or not of a kind that the planner knows",
            err=True,
        )
    if out is not None:
        there = shlex.quote(str(out))
        typer.echo(
            f"{out} is written; next: pdserve plan {there}, pdserve preflight {there}, pdserve up {there}", err=True
        )


def _option_or_answer(value: str | None, option: str, choices: str) -> str:
    """Return the option, or the answer at a terminal."""
    if value is not None:
        return value
    if not sys.stdin.isatty():
        raise typer.BadParameter(f"{option} is missing: give {choices}")
    return str(typer.prompt(f"{option.lstrip('-')} ({choices})", err=True))
