"""The planned sweep: the recipe of every combination, read before anything runs, and how long its points will take."""

from __future__ import annotations

import heapq
import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from pdserve.bench.workload import Load, Workload
from pdserve.errors import RecipeError
from pdserve.recipe.load.loader import LoadedRecipe, load_recipe
from pdserve.sweep.caches import only_emptied_by_a_start
from pdserve.sweep.file import LoadedSweep, Point, Settings, Variant, by_deployment, combinations, points, recipe_digest
from pdserve.sweep.record import PointRecord

_NAME_CHARACTERS, _ID_CHARACTERS = 48, 6
"""Of the name of a deployment (pdserve.recipe.base), and of its id in it."""


@dataclass(frozen=True)
class PlannedSweep:
    """Holds what a sweep will run."""

    loaded: LoadedSweep
    points: tuple[Point, ...]
    """All of them, in their order."""
    recipes: Mapping[str, LoadedRecipe]
    """By the digest of a deployment."""
    combinations: int
    folder_name: str
    """The deployment's name outside of a Slurm job: all jobs share the folder of the sweep."""

    @property
    def name(self) -> str:
        """Return the name of the deployment: no point can change it."""
        return next(iter(self.recipes.values())).recipe.name

    def start_for_each_point(self, deployment: Variant) -> str | None:
        """Return why a deployment is started anew before each of its points; None: once for all of them."""
        if not self.loaded.sweep.restart_to_empty_caches:
            return None
        return only_emptied_by_a_start(self.recipes[deployment.digest].recipe)

    def starts(self, some: Sequence[Point]) -> int:
        """Return how many starts these points need, if nothing fails in between."""
        groups = by_deployment(some)
        return sum(1 if self.start_for_each_point(deployment) is None else len(its) for deployment, its in groups)

    def of(self, deployment: str) -> tuple[Point, ...]:
        """Return the points of a deployment, by its id."""
        return tuple(point for point in self.points if point.deployment.digest == deployment)


def resolve(loaded: LoadedSweep, environ: Mapping[str, str]) -> PlannedSweep:
    """Read the recipe of every combination and plan its points. Raises RecipeError at the first combination that is no
    valid recipe, with the lines of the sweep file."""
    recipes: dict[str, LoadedRecipe] = {}
    digests: list[tuple[Settings, str]] = []
    names: list[str] = []
    for settings in combinations(loaded.sweep):
        with errors_with_sweep_lines(settings, loaded):
            recipe = load_recipe(loaded.recipe, set_=set_of(settings), environ=environ)
        lasting = _lasting(recipe, loaded, settings, environ)
        # `../x` is the folder that it is from beside it.
        digest = recipe_digest(lasting.document, os.path.normpath(recipe.path.parent.absolute()))
        recipes.setdefault(digest, recipe)
        digests.append((settings, digest))
        names.append(lasting.recipe.name)
    return PlannedSweep(loaded, points(loaded.sweep, digests, loaded.traces), recipes, len(digests), names[0])


def select_deployment(planned: PlannedSweep, deployment: str, environ: Mapping[str, str]) -> PlannedSweep:
    """Return a deployment of a sweep that may run beside its others: it has a name of its own, so that its runs and its
    lock are its own too. Raises RecipeError when the sweep has none of that id."""
    points_of = planned.of(deployment)
    if not points_of:
        raise RecipeError(
            f"--only {deployment}: this sweep has no such deployment",
            where=str(planned.loaded.path),
            cause="the sweep file, its recipe or a variable that they read is not as it was when the id was printed",
            todo="pdserve sweep FILE --dry-run prints the ids; pdserve sweep FILE --slurm submits what is missing",
        )
    settings = points_of[0].deployment.settings
    named = [*set_of(settings), f"name={_own_name(planned.name, deployment)}"]
    recipe = load_recipe(planned.loaded.recipe, set_=named, environ=environ)
    return replace(planned, points=points_of, recipes={deployment: recipe}, combinations=1)


def _own_name(name: str, deployment: str) -> str:
    return f"{name[: _NAME_CHARACTERS - _ID_CHARACTERS - 1].rstrip('-')}-{deployment[:_ID_CHARACTERS]}"


def _lasting(recipe: LoadedRecipe, loaded: LoadedSweep, settings: Settings, environ: Mapping[str, str]) -> LoadedRecipe:
    """Return the recipe without what a Slurm job puts into it (`${SLURM_JOB_ID:-local}`): a point that is measured in
    another job is the same point."""
    outside = {name: value for name, value in environ.items() if not name.startswith("SLURM_")}
    if len(outside) == len(environ):
        return recipe
    try:
        return load_recipe(loaded.recipe, set_=set_of(settings), environ=outside)
    except RecipeError:  # it can only be read in a job
        return recipe


def set_of(settings: Settings) -> list[str]:
    """Return the settings as options of `pdserve up`."""
    return [f"{key}={value}" for key, value in settings]


@contextmanager
def errors_with_sweep_lines(settings: Settings, loaded: LoadedSweep) -> Iterator[None]:
    """Give an error of a combination the lines of the sweep file."""
    try:
        yield
    except RecipeError as error:
        raise _placed(error, loaded, settings) from None


def _placed(error: RecipeError, loaded: LoadedSweep, settings: Settings) -> RecipeError:
    """Place an error: an option that it names, and that was not typed, gets the line of the sweep file."""

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


@dataclass(frozen=True)
class Estimate:
    """Estimates what is still to be run."""

    seconds: float
    """The seconds that are known."""
    unknown_points: int
    """Without a former measurement of the same work and load."""
    starts: int
    unknown_starts: int


def estimate(to_run: Sequence[Point], former: Sequence[PointRecord], starts: int) -> Estimate:
    """Estimate the time that points take: each as long as those of the same work and load did on other deployments, a
    start as long as others. `starts`: that these points need."""
    measured: dict[tuple[str, str], list[float]] = {}
    for record in former:
        if record.result is not None:
            measured.setdefault(_same(record.workload, record.load), []).append(record.seconds)
    known = [measured.get(_same(point.workload, point.load)) for point in to_run]
    took = [record.start_seconds for record in former if record.start_seconds is not None]
    seconds = sum(statistics.fmean(each) for each in known if each) + (statistics.fmean(took) * starts if took else 0.0)
    return Estimate(seconds, sum(each is None for each in known), starts, 0 if took else starts)


def array_seconds(tasks: Sequence[Estimate], at_once: int | None) -> float:
    """Return the seconds of tasks that run beside each other, as Slurm starts them: in their order, each once another
    one has ended. Without the time in the queue."""
    if not tasks:
        return 0.0
    slots = [0.0] * min(len(tasks), at_once or len(tasks))
    for task in tasks:
        heapq.heapreplace(slots, slots[0] + task.seconds)
    return max(slots)


def _same(workload: Workload, load: Load) -> tuple[str, str]:
    return workload.model_dump_json(), load.model_dump_json()
