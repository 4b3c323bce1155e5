"""A launch file with several deployments as a recipe and a sweep file: written, read again, and each of its points
compared with what its variant is alone."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from pdserve.errors import RecipeError, SourceDifferenceError
from pdserve.importing.annotated import annotated, commented, line
from pdserve.importing.compare import departures
from pdserve.importing.formats import imported_sweep
from pdserve.importing.launch import Draft, Note, Sourced
from pdserve.importing.sweep_draft import SweepDraft, shown_names
from pdserve.operations.import_recipe import save
from pdserve.recipe.load.extends import text_of
from pdserve.recipe.load.loader import load_recipe
from pdserve.recipe.load.problems import dotted
from pdserve.recipe.model import Recipe
from pdserve.sweep.file import load_sweep
from pdserve.sweep.points import combinations
from pdserve.sweep.resolve import resolve, set_of

_TITLES = {
    "served": "NOT CARRIED OVER, and it changes what is served",
    "confirm": "PLEASE CONFIRM",
    "replaced": "done otherwise by a sweep of pdserve",
    "unused": "no part of what is served",
}
_SHOWN = 5


@dataclass(frozen=True)
class ImportedSweep:
    """Both texts. They load, and every point is what its variant is, but for what `draft` lists."""

    recipe: str
    sweep: str
    draft: SweepDraft
    points: int


def import_sweep(file: Path, recipe: Path, sweep: Path, environ: Mapping[str, str]) -> ImportedSweep:
    """`recipe`, `sweep`: where the two will be. Raises RecipeError where the file has no deployments that become a
    sweep, or none that is valid."""
    draft = imported_sweep(text_of(file), str(file))
    if draft is None:
        raise RecipeError(
            "the file describes no sweep",
            where=str(file),
            cause="a sweep is made of an srt-slurm recipe with `sweep`, or with `base` and `override_*`",
            todo="leave --sweep out: pdserve import prints the recipe of a single deployment",
        )
    draft = replace(draft, document={**draft.document, "name": str(draft.recipe.document["name"])})
    beside = Path(recipe.name) if recipe.absolute().parent == sweep.absolute().parent else recipe.absolute()
    with tempfile.TemporaryDirectory() as folder:
        draft, points = _checked(draft, Path(folder), file, environ)
    return ImportedSweep(annotated(draft.recipe), _text(draft, str(beside)), draft, points)


def write_sweep(imported: ImportedSweep, recipe: Path, sweep: Path) -> None:
    """Two new files. Raises RecipeError where one of them is there already: then neither is written."""
    if sweep.exists():
        todo = "choose another name, or remove the file; nothing is overwritten"
        raise RecipeError("the file is there already", where=str(sweep), todo=todo)
    save(imported.recipe, recipe)
    save(imported.sweep, sweep)


def check_whole(imported: ImportedSweep, file: Path) -> None:
    """Raises SourceDifferenceError where something is lost that changes what is served."""
    if losses := imported.draft.losses():
        raise SourceDifferenceError(
            f"imported in part: {len(losses)} not carried over, and what is served may differ",
            where=str(file),
            todo="add what is lacking; the first lines of the recipe and of the sweep file repeat this list",
            evidence=tuple(line(note) for note in losses),
        )


def _checked(draft: SweepDraft, folder: Path, file: Path, environ: Mapping[str, str]) -> tuple[SweepDraft, int]:
    recipe, sweep = folder / "recipe.yaml", folder / "sweep.yaml"
    try:
        recipe.write_text(annotated(draft.recipe), encoding="utf-8")
        sweep.write_text(_text(draft, recipe.name), encoding="utf-8")
        loaded = load_sweep(sweep)
        planned = resolve(loaded, environ)
        notes = []
        for place, (settings, (name, variant)) in enumerate(
            zip(combinations(loaded.sweep), draft.deployments, strict=True)
        ):
            ours = load_recipe(recipe, set_=set_of(settings), environ=environ).recipe
            theirs = _alone(variant, folder / f"variant-{place}.yaml", environ)
            if different := [dotted(one.path) for one in departures(ours, theirs)]:
                shown = ", ".join(different[:_SHOWN]) + (" and more" if len(different) > _SHOWN else "")
                at = Sourced(None, name or "the file", 0)
                notes.append(Note(at, f"its point is not the same as the variant alone: {shown}", "served"))
    except RecipeError as error:
        raise RecipeError(
            "the sweep that this file becomes is not valid",
            where=str(file),
            cause="a variant of the file combines what pdserve refuses",
            todo="import the others one by one with --variant, or change the file as the lines below say",
            evidence=tuple(error.render().replace(f"{folder}/", "").splitlines()),
        ) from None
    return replace(draft, notes=(*draft.notes, *notes)), len(planned.points)


def _alone(variant: Draft, path: Path, environ: Mapping[str, str]) -> Recipe:
    path.write_text(annotated(variant), encoding="utf-8")
    return load_recipe(path, environ=environ).recipe


def _text(draft: SweepDraft, recipe: str) -> str:
    head = [
        f"Imported from {draft.recipe.file} ({draft.recipe.format}). The recipe has where its values came from.",
    ]
    if len(draft.deployments) > 1:
        head += ["", "The values of `zip`, by their places, are these deployments of the file:"]
        head += [f"  {place}: {name}" for place, name in shown_names(draft.deployments).items()]
    for effect, title in _TITLES.items():
        notes = [note for note in draft.notes if note.effect == effect]
        head += ["", f"{title}:"] if notes else []
        head += [f"  {line(note)}" for note in notes]
    document = {"schema": 1, "name": draft.document["name"], "recipe": recipe}
    document |= {key: value for key, value in draft.document.items() if key not in document}
    return commented(document, {}, head, "sweep.yaml")
