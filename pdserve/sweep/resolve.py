"""Reads the recipe of every combination before anything runs, so that a sweep does not end at a typo after hours."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pdserve.errors import RecipeError
from pdserve.recipe.load.loader import LoadedRecipe, load_recipe
from pdserve.sweep.file import LoadedSweep
from pdserve.sweep.points import Point, Settings, combinations, points, recipe_digest


@dataclass(frozen=True)
class PlannedSweep:
    """What a sweep will run."""

    loaded: LoadedSweep
    points: tuple[Point, ...]
    """All of them, in their order."""
    recipes: Mapping[str, LoadedRecipe]
    """By the digest of a deployment."""
    combinations: int

    @property
    def name(self) -> str:
        """Of the deployment: no point can change it."""
        return next(iter(self.recipes.values())).recipe.name


def resolve(loaded: LoadedSweep, environ: Mapping[str, str]) -> PlannedSweep:
    """Raises RecipeError at the first combination that is no valid recipe, with the lines of the sweep file."""
    recipes: dict[str, LoadedRecipe] = {}
    digests: list[tuple[Settings, str]] = []
    for settings in combinations(loaded.sweep):
        try:
            recipe = load_recipe(loaded.recipe, set_=set_of(settings), environ=environ)
        except RecipeError as error:
            raise _placed(error, loaded, settings) from None
        digest = recipe_digest(recipe.document, str(recipe.path.parent.absolute()))
        recipes.setdefault(digest, recipe)
        digests.append((settings, digest))
    return PlannedSweep(loaded, points(loaded.sweep, digests, loaded.traces), recipes, len(digests))


def set_of(settings: Settings) -> list[str]:
    """As options of `pdserve up`."""
    return [f"{key}={value}" for key, value in settings]


def _placed(error: RecipeError, loaded: LoadedSweep, settings: Settings) -> RecipeError:
    """What names an option that was not typed names the line of the sweep file as well."""

    def placed(text: str) -> str:
        for key, _ in settings:
            if text.startswith((f"--set {key}=", f"--set {key}:")) or text == f"--set {key}":
                return f"{loaded.locate_key(key)}: {text}"
        return text

    with_all = ", ".join(f"{key}={value}" for key, value in settings)
    return RecipeError(
        f"{error.what} (the combination {with_all})" if settings else error.what,
        where=None if error.where is None else placed(error.where),
        cause=error.cause,
        todo=error.todo,
        evidence=tuple(placed(line) for line in error.evidence),
    )
