"""A recipe file -> `LoadedRecipe`: extends, --set and --unset, ${ENV}, validation, rules; every problem with its line.

The only part of this package that reads files. It never reads the process environment: that is an argument.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any

from pydantic import ValidationError

from pdserve.recipe import environment, explain, extends, overrides, rules, secrets, shape, yaml12
from pdserve.recipe.model import Recipe, RecipeDocument
from pdserve.recipe.problems import Origin, Path, Problem, error, locate, warning

_STAND_INS: dict[str, Any] = {
    "schema": 1,
    "name": "x",
    "platform": "cuda",
    "model": {"path": "x", "served_name": "x"},
    "served_name": "x",
    "l1_size_gb": 1,
    "secret": "X",
}
"""Valid values for required keys that are wrong or missing, so that the rules can look at the rest."""
_ROUNDS = 4
_NULL_IS_DATA = ("args", "extra_args", "l2", "config")


@dataclass(frozen=True)
class LoadedRecipe:
    """A valid recipe and what it was made of."""

    recipe: Recipe
    document: RecipeDocument
    """The resolved document: extends merged, overrides and variables applied. Secrets are references."""
    path: FilePath
    warnings: tuple[str, ...]
    """One line each, with file and line."""
    origins: Mapping[Path, Origin] = field(repr=False)

    def locate(self, dotted: str) -> str:
        """`file.yaml:12` for `prefill.connector`, or the line of its nearest ancestor that is written down; for
        what the command line set, the option."""
        path = tuple(int(part) if part.isdecimal() else part for part in dotted.split(".")) if dotted else ()
        return str(locate(path, self.origins) or Origin(str(self.path)))

    def to_yaml(self, *, model_path: str | None = None) -> str:
        """The resolved document as a recipe of its own, loadable from the same folder; with `model_path`, the
        absolute path of a local model, loadable from anywhere."""
        document = extends.with_absolute_files(self.document, self.path.parent)
        if model_path is not None:
            document = {**document, "model": {**document["model"], "path": model_path}}
        return yaml12.dump(environment.escape(document))


def load_recipe(
    path: FilePath, *, set_: Sequence[str] = (), unset: Sequence[str] = (), environ: Mapping[str, str]
) -> LoadedRecipe:
    """The recipe at `path`. RecipeError tells everything that is wrong with it at once."""
    document = extends.read(path, lambda text: environment.substitute(text, environ))
    overrides.apply(document, set_, unset)
    failed = environment.resolve(document, environ)
    _reset_nulls(document.data, document.data)
    leaked = list(secrets.literal(document.data))
    found = [*document.problems, *leaked]
    known_bad = failed.union(*(p.spoils for p in found))
    recipe, invalid = _validate(document.data, known_bad)
    found += invalid
    if recipe is not None:
        bad = known_bad.union(*(p.spoils for p in invalid))
        broken = [p for p in rules.problems(recipe) if not any(p.concerns(b) for b in bad)]
        found += [] if ("platform",) in bad else broken
    if found or recipe is None:
        raise error(found, document.origins, str(path))
    notes = tuple(warning(p, document.origins, str(path)) for p in rules.warnings(recipe))
    return LoadedRecipe(recipe, document.data, path, notes, document.origins)


def _validate(data: RecipeDocument, known_bad: set[Path]) -> tuple[Recipe | None, list[Problem]]:
    """The recipe, and what pydantic objects to. Where something is wrong the recipe is made of the rest, so that the
    rules can be applied as well and everything is told at once; None where not even that is possible."""
    found: list[Problem] = []
    bad = set(known_bad)
    rest = data
    for _ in range(_ROUNDS):
        try:
            return Recipe.model_validate(rest), found
        except ValidationError as failure:
            fresh = explain.problems(failure, rest)
        found += [p for p in fresh if not any(p.concerns(b) for b in bad)]
        bad = bad.union(*(p.spoils for p in fresh))
        for problem in fresh:
            if not problem.path:
                return None, found
            path = _droppable(problem.path)
            required = (info := shape.field_at(path, rest)) is not None and info.is_required()
            rest = _mended(rest, path, _STAND_INS.get(str(path[-1])) if required else None)
    return None, found


def _droppable(path: Path) -> Path:
    """What to leave out when `path` is wrong: half a connector means nothing."""
    return path[: path.index("connector") + 1] if "connector" in path else path


def _mended(data: Any, path: Path, stand_in: Any) -> Any:
    """A copy of `data` that lacks `path`, or has `stand_in` there."""
    head, below = path[0], path[1:]
    if isinstance(data, dict):
        if below:
            return {key: _mended(value, below, stand_in) if key == head else value for key, value in data.items()}
        rest = {key: value for key, value in data.items() if key != head}
        return rest if stand_in is None else {**rest, head: stand_in}
    if isinstance(data, list) and isinstance(head, int) and head < len(data):
        changed = [_mended(data[head], below, stand_in)] if below else []
        return [*data[:head], *changed, *data[head + 1 :]]
    return data


def _reset_nulls(data: Any, whole: RecipeDocument, path: Path = ()) -> None:
    """Drop the keys that are null, so that they have their defaults; inside flags and raw JSON null is data. A key that
    the format does not have stays, for the validation to refuse it: a typo says nothing, whatever its value."""
    if isinstance(data, dict):
        for key in [k for k, v in data.items() if v is None and not _unknown((*path, k), whole)]:
            del data[key]
        for key, value in data.items():
            if key not in _NULL_IS_DATA:
                _reset_nulls(value, whole, (*path, key))
    elif isinstance(data, list):
        for index, value in enumerate(data):
            _reset_nulls(value, whole, (*path, index))


def _unknown(path: Path, whole: RecipeDocument) -> bool:
    return bool(shape.models_at(path[:-1], whole)) and shape.field_at(path, whole) is None
