"""`pdserve import`"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import typer

from pdserve.importing.annotated import line
from pdserve.importing.choice import ImportChoice
from pdserve.importing.launch import Draft
from pdserve.operations import import_recipe
from pdserve.operations.import_recipe import Ask
from pdserve.sweep import imported


def variables(texts: Sequence[str]) -> dict[str, str]:
    """`NAME=VALUE`, several of them. Raises BadParameter."""
    for text in texts:
        if not text.partition("=")[0].isidentifier() or "=" not in text:
            raise typer.BadParameter(f"--var {text}: write --var NAME=VALUE")
    return {name: value for name, _, value in (text.partition("=") for text in texts)}


def run(file: Path, out: Path | None, choice: ImportChoice, ask: Ask) -> None:
    """Prints the recipe, or writes it to `out`; what was not carried over goes to stderr. Raises RecipeError, and
    SourceDifferenceError for an import in part."""
    recipe = import_recipe.import_file(file, choice, ask=ask)
    if out is None:
        typer.echo(recipe.text, nl=False)
    else:
        import_recipe.save(recipe.text, out)
    _warn([recipe])
    _report(recipe.draft, out)
    import_recipe.check_whole(recipe, file)


def run_sweep(file: Path, out: Path, sweep: Path, ask: Ask) -> None:
    """Writes a recipe and a sweep file over it; what was not carried over goes to stderr. Raises RecipeError, and
    SourceDifferenceError for an import in part."""
    made = imported.import_sweep(file, out, sweep, os.environ, ask)
    imported.write_sweep(made, out, sweep)
    _warn([import_recipe.ImportedRecipe(made.recipe, made.draft.recipe, loaded) for loaded in made.recipes])
    for note in made.draft.notes:
        if note.effect == "confirm":
            typer.echo(f"please confirm: {line(note)}", err=True)
    _report(made.draft.recipe, out)
    deployments = len(made.draft.deployments)
    typer.echo(f"{sweep}: {made.points} points on {deployments} deployments; next: pdserve sweep {sweep} --dry-run")
    imported.check_whole(made, file)


def check(recipe: Path, file: Path, choice: ImportChoice, ask: Ask) -> None:
    """Prints that the recipe is what the file describes. Raises SourceDifferenceError where it departs."""
    import_recipe.compare(recipe, file, choice, ask)
    typer.echo(f"{recipe}: what {file} describes")


def _warn(recipes: Sequence[import_recipe.ImportedRecipe]) -> None:
    """Of all of them, each once: of the recipe, and of the versions that the file names."""
    texts = [_without_line(warning) for recipe in recipes for warning in recipe.loaded.warnings]
    texts += [hazard for recipe in recipes for hazard in import_recipe.version_hazards(recipe)]
    for text in dict.fromkeys(texts):
        typer.echo(f"warning: {text}", err=True)


def _without_line(warning: str) -> str:
    """The recipe was read from a file that is not there any more. What a point of a sweep has set is its own place."""
    return warning if warning.startswith("--set ") else warning.partition(": ")[2]


def _report(draft: Draft, out: Path | None) -> None:
    for note in draft.notes:
        if note.effect == "confirm":
            typer.echo(f"please confirm: {line(note)}", err=True)
    others = sum(note.effect in ("replaced", "unused") for note in draft.notes)
    where = "the recipe" if out is None else str(out)
    typer.echo(f"{draft.file} ({draft.format}): the first lines of {where} list {others} further values", err=True)
