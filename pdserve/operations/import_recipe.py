"""Read the launch file of another tool: the recipe that it becomes, checked, and where a recipe departs from it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pdserve.errors import RecipeError, SourceDifferenceError
from pdserve.importing.connectors import acceptances
from pdserve.importing.departure import Departure, departures
from pdserve.importing.formats import STORES, STRATEGIES, TAXONOMY, import_launch
from pdserve.importing.launch import Draft, ImportChoice, Note, SourcedValue
from pdserve.importing.recipe_text import annotated_text, line
from pdserve.installed.versions import Versions
from pdserve.operations.plan_recipe import load, plan_for
from pdserve.plan.versions import check_coverage, known_hazards, recipe_use
from pdserve.recipe.load import yaml12
from pdserve.recipe.load.loader import LoadedRecipe, load_recipe
from pdserve.recipe.load.problems import dotted, locate
from pdserve.recipe.load.recipe_document import text_of
from pdserve.roles import ENGINE_ROLES


@dataclass(frozen=True)
class ImportedRecipe:
    """Holds a recipe that loads, its text, and what the file has beside it."""

    text: str
    draft: Draft
    loaded: LoadedRecipe


def import_file(file: Path, choice: ImportChoice, environ: Mapping[str, str] = os.environ) -> ImportedRecipe:
    """Return the recipe that `file` describes. Raises RecipeError where it describes none, or none that is valid."""
    draft = import_launch(text_of(file), str(file), choice, _collection_files(file))
    text = annotated_text(draft)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{draft.document['name']}.yaml"
        path.write_text(text, encoding="utf-8")
        try:
            loaded = load_recipe(path, set_=_accepting_lines(draft), environ=environ)
            plan_for(loaded, None, run_dir="RUN_DIR", run_id="RUN_ID")
        except RecipeError as error:
            raise RecipeError(
                "the recipe that this file becomes is not valid",
                where=str(file),
                cause="the file combines what pdserve refuses",
                todo="change the file as the lines below say, and import again",
                evidence=tuple(error.render().replace(f"{folder}/", "").splitlines()),
            ) from None
    return ImportedRecipe(text, draft, loaded)


def _accepting_lines(draft: Draft) -> list[str]:
    """Return the draft's lines with what only the user may write: whether the rest is valid does not depend on it."""
    return [
        f"{dotted((role, 'connector', *key))}=true"
        for role in ENGINE_ROLES
        if isinstance(section := draft.document.get(role), Mapping)
        for key in acceptances(section.get("connector", {}))
    ]


def version_hazards(recipe: ImportedRecipe) -> list[str]:
    """Return what is known of the versions that the file names, for what its recipe uses; an entry for each.

    What is known whatever the version is not repeated: the plan warns of it."""
    named = recipe.draft.versions
    if not named:
        return []
    use = recipe_use(recipe.loaded.recipe)
    always = set(known_hazards(use.features, use.flags, Versions()))
    versions = Versions.model_validate({package: str(at.value) for package, at in named.items()})
    texts = [text for text in known_hazards(use.features, use.flags, versions) if text not in always]
    texts += check_coverage(named, versions)
    where = ", ".join(f"{package} {at.value} ({_place(at)})" for package, at in named.items())
    return [f"the file names {where}: {text}" for text in texts]


def _place(at: SourcedValue) -> str:
    return f"line {at.line}, {at.key}" if at.line else at.key


def _collection_files(file: Path) -> dict[str, str]:
    """Return the files of the collection that `file` is in, by their paths there; empty where it is in none."""
    for folder in file.absolute().parents:
        if (folder / TAXONOMY).is_file():
            there = [folder / TAXONOMY]
            there += (path for name in (STRATEGIES, STORES) for path in sorted((folder / name).glob("*.yaml")))
            return {str(path.relative_to(folder)): text_of(path) for path in there}
    return {}


def save(text: str, out: Path) -> None:
    """Write a recipe to a new file. Raises RecipeError where there is one already."""
    try:
        with out.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        todo = "choose another name, or remove the file; nothing is overwritten"
        raise RecipeError("the file is there already", where=str(out), todo=todo) from None
    except OSError as error:
        todo = "choose a folder that is there and that you can write to"
        raise RecipeError(f"the recipe cannot be written: {error.strerror}", where=str(out), todo=todo) from error


def check_whole(losses: Sequence[Note], file: Path) -> None:
    """Check that an import lacks nothing that changes what is served. Raises SourceDifferenceError."""
    if losses:
        raise SourceDifferenceError(
            f"imported in part: {_values(len(losses))} not carried over, and what is served may differ",
            where=str(file),
            todo="add what is lacking; the first lines of what was written repeat this list",
            evidence=tuple(line(note) for note in losses),
        )


def compare(recipe: Path, file: Path, choice: ImportChoice) -> None:
    """Compare a recipe with the file that it was imported from. Raises SourceDifferenceError where it departs from the
    file."""
    ours = load(recipe, (), ())
    source = import_file(file, choice)
    if not (differing := departures(ours.recipe, source.loaded.recipe)):
        return
    number = f"{len(differing)} {'value' if len(differing) == 1 else 'values'}"
    raise SourceDifferenceError(
        f"it departs from {file} in {number}",
        where=str(recipe),
        todo=f"change the recipe, or keep what is meant; `pdserve import {file}` prints what the file becomes",
        evidence=tuple(_departure(one, ours, source) for one in differing),
    )


def _departure(one: Departure, ours: LoadedRecipe, source: ImportedRecipe) -> str:
    here = locate(one.path, ours.origins)
    end = next((one.path[:end] for end in range(len(one.path), 0, -1) if one.path[:end] in source.draft.origins), None)
    there = f" (line {source.draft.origins[end]})" if end is not None and one.source is not None else ""
    return f"{dotted(one.path)}: {_value_text(one.recipe)} ({here}), in the source {_value_text(one.source)}{there}"


def _value_text(value: object, limit: int = 100) -> str:
    if value is None:
        return "not set"
    text = yaml12.flow(value)
    return text if len(text) <= limit else f"{text[:limit]}..."


def _values(number: int) -> str:
    return "one value was" if number == 1 else f"{number} values were"
