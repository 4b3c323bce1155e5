"""A launch file with several deployments as a recipe and a sweep file: written, read again, and each of its points
compared with what its variant is alone."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pdserve.errors import RecipeError
from pdserve.importing.connectors import with_acceptances
from pdserve.importing.departure import departures
from pdserve.importing.formats import import_variants
from pdserve.importing.launch import Draft, Note, SourcedValue
from pdserve.importing.recipe_text import annotated_text, commented_yaml, line
from pdserve.importing.sweep_draft import SweepDraft, shown_names
from pdserve.operations.import_recipe import save
from pdserve.recipe.load.loader import LoadedRecipe, load_recipe
from pdserve.recipe.load.problems import dotted
from pdserve.recipe.load.recipe_document import text_of
from pdserve.recipe.model import Recipe
from pdserve.roles import ENGINE_ROLES
from pdserve.sweep.file import PlannedSweep, combinations, load_sweep, resolve, set_of

_TITLES = {
    "served": "NOT CARRIED OVER, and it changes what is served",
    "confirm": "PLEASE CONFIRM",
    "replaced": "done otherwise by a sweep of pdserve",
    "unused": "no part of what is served",
}
_SHOWN = 5


@dataclass(frozen=True)
class ImportedSweep:
    """Holds both texts. They load, and every point is what its variant is, but for what `draft` lists."""

    recipe: str
    sweep: str
    draft: SweepDraft
    points: int
    recipes: tuple[LoadedRecipe, ...]
    """The recipes of each deployment, as they were read again."""


def import_sweep(file: Path, recipe: Path, sweep: Path, environ: Mapping[str, str]) -> ImportedSweep:
    """Import a sweep and the recipe that it varies. `recipe`, `sweep`: where the two will be. Raises RecipeError where
    the file has no deployments that become a sweep, or none that is valid."""
    draft = import_variants(text_of(file), str(file))
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
        draft, planned = _checked(draft, Path(folder), file, environ)
    written, recipes = _text(draft, str(beside)), tuple(planned.recipes.values())
    return ImportedSweep(annotated_text(draft.recipe), written, draft, len(planned.points), recipes)


def write_sweep(imported: ImportedSweep, recipe: Path, sweep: Path) -> None:
    """Write the sweep and its recipe into two new files. Raises RecipeError where one of them is there already or
    cannot be written: then neither is."""
    if recipe.absolute() == sweep.absolute():
        raise RecipeError("--out and --sweep name the same file", where=str(sweep), todo="give each a name of its own")
    save(imported.sweep, sweep)
    try:
        save(imported.recipe, recipe)
    except RecipeError:
        sweep.unlink(missing_ok=True)  # it is ours, and new
        raise


def _checked(
    draft: SweepDraft, folder: Path, file: Path, environ: Mapping[str, str]
) -> tuple[SweepDraft, PlannedSweep]:
    recipe, sweep = folder / "recipe.yaml", folder / "sweep.yaml"
    try:
        recipe.write_text(annotated_text(_as_accepted(draft.recipe)), encoding="utf-8")
        sweep.write_text(
            _text(replace(draft, document=_zip_as_accepted(draft.document)), recipe.name), encoding="utf-8"
        )
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
                at = SourcedValue(None, name or "the file", 0)
                notes.append(Note(at, f"its point is not the same as the variant alone: {shown}", "served"))
    except RecipeError as error:
        raise RecipeError(
            "the sweep that this file becomes is not valid",
            where=str(file),
            cause="a variant of the file combines what pdserve refuses",
            todo="import the others one by one with --variant, or change the file as the lines below say",
            evidence=tuple(error.render().replace(f"{folder}/", "").splitlines()),
        ) from None
    return replace(draft, notes=(*draft.notes, *notes)), planned


def _alone(variant: Draft, path: Path, environ: Mapping[str, str]) -> Recipe:
    path.write_text(annotated_text(_as_accepted(variant)), encoding="utf-8")
    return load_recipe(path, environ=environ).recipe


def _as_accepted(draft: Draft) -> Draft:
    """Accept for the user what only the user may write: it counts as written, as in the import of a single recipe."""
    return replace(draft, document=_roles_as_accepted(draft.document))


def _roles_as_accepted(document: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: {**value, "connector": with_acceptances(value["connector"])}
        if key in ENGINE_ROLES and isinstance(value, Mapping) and isinstance(value.get("connector"), Mapping)
        else value
        for key, value in document.items()
    }


def _zip_as_accepted(document: Mapping[str, Any]) -> dict[str, Any]:
    """Lists over the whole connector of a role, or over the whole role."""

    def one(key: str, value: Any) -> Any:
        role, _, below = key.partition(".")
        if role in ENGINE_ROLES and below == "connector" and isinstance(value, Mapping):
            return with_acceptances(value)
        return _roles_as_accepted({key: value})[key]

    lists = {key: [one(key, value) for value in values] for key, values in document.get("zip", {}).items()}
    return {**document, **({"zip": lists} if lists else {})}


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
    return commented_yaml(document, {}, head, "sweep.yaml")
