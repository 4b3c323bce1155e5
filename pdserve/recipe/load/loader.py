"""A recipe file -> `LoadedRecipe`: extends, --set and --unset, ${ENV}, validation, rules; every problem with its line.

The only part of this package that reads files. It never reads the process environment: that is an argument.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any

from pdserve.errors import RecipeError
from pdserve.recipe import rules, secrets
from pdserve.recipe.load import environment, extends, overrides, yaml12
from pdserve.recipe.load.problems import Origin, Path, error, locate, warning
from pdserve.recipe.load.validation import reset_nulls, validate
from pdserve.recipe.model import Recipe, RecipeDocument

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
    """The recipe at `path`. Raises RecipeError with everything that is wrong with it."""
    document = extends.read(path, lambda text: environment.substitute(text, environ))
    if "hosts" in document.data and "model" not in document.data:
        raise RecipeError(
            "this is a cluster file, not a recipe",
            where=str(document.origins.get(("hosts",), path)),
            todo=f"give it beside a recipe: --cluster {path}",
        )
    overrides.apply(document, set_, unset)
    failed = environment.resolve(document, environ)
    extends.locate_resolved(document, failed)
    reset_nulls(document.data)
    leaked = [p for p in secrets.find_literals(document.data) if p.path not in failed]
    problems = [*document.problems, *leaked]
    known_bad = failed.union(*(p.spoils for p in problems))
    recipe, invalid = validate(Recipe, document.data, known_bad, _STAND_INS, document.spellings)
    problems += invalid
    if recipe is not None:
        bad = known_bad.union(*(p.spoils for p in invalid))
        broken = [p for p in rules.problems(recipe) if not any(p.concerns(b) for b in bad)]
        problems += [] if ("platform",) in bad else broken
    if problems or recipe is None:
        raise error(problems, document.origins, str(path))
    notes = tuple(warning(p, document.origins, str(path)) for p in rules.warnings(recipe))
    return LoadedRecipe(recipe, document.data, path, notes, document.origins)
