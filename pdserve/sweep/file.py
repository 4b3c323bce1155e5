"""The sweep file, read as strictly as a recipe, and the plan of a sweep: the recipe of every combination, read before
anything runs, and the points in the order that changes the deployment least."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path as FilePath
from typing import Annotated, Any, Literal

from pydantic import Field

from pdserve.bench.workload import AGENTIC, Load, RequestTrace, Workload, usual_requests, with_trace
from pdserve.errors import RecipeError
from pdserve.recipe.base import Count, Name, Strict
from pdserve.recipe.load import recipe_document, show, yaml12
from pdserve.recipe.load.loader import LoadedRecipe, load_recipe
from pdserve.recipe.load.problems import Line, Origin, Path, Problem, error, locate
from pdserve.recipe.load.validation import validate
from pdserve.sweep.caches import kept_until_start

_STAND_INS: dict[str, Any] = {
    "schema": 1,
    "name": "x",
    "recipe": "x",
    "workload": [{"input_tokens": 1, "output_tokens": 1}],
    "input_tokens": 1,
    "output_tokens": 1,
}
_KEPT = {
    "name": "the points of a sweep are deployments of the same name",
    "extends": "it is read before every other key",
    "schema": "it is the version of the recipe's format",
}
"""Keys of a recipe that no point can set, and why."""

Rate = Annotated[float, Field(gt=0)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Values = Annotated[list[Any], Field(min_length=1)]


class Sweep(Strict):
    """Says what is measured: every workload and load, on every combination of `zip` and `cross`."""

    schema_: Literal[1] = Field(alias="schema", description="Version of this format.")
    name: Name = Field(description="Names the folder of its points: the same name goes on where it was cut off.")
    recipe: str = Field(description="The recipe that is varied, relative to this file.")
    workload: list[Workload] = Field(
        min_length=1, description="Prompts and answers, as the options of `pdserve bench`."
    )
    concurrency: list[Count] = Field(default=[], description="Requests that are open at a time.")
    rate: list[Rate] = Field(default=[], description="Requests a second (Poisson arrivals).")
    requests: Count | None = Field(
        default=None,
        description="Requests of each load; null: ten times the load, 32 at least. A trace has its own.",
    )
    seconds: Positive | None = Field(default=None, description="After which nothing is sent any more.")
    grace_seconds: NotNegative | None = Field(default=None, description="That open requests then have; null: 30.")
    restart_to_empty_caches: bool = Field(
        default=True,
        description="Start a deployment anew before a point where a cache cannot be emptied otherwise. false: that "
        "cache is left as it is, and only the salt of each run keeps points apart.",
    )
    zip: dict[str, Values] = Field(
        default={}, description="Lists of one length over keys of the recipe (as --set takes them): first with first."
    )
    cross: dict[str, Values] = Field(
        default={}, description="Lists over keys of the recipe (as --set takes them): each with each, and with `zip`."
    )


@dataclass(frozen=True)
class LoadedSweep:
    """A valid sweep file and where its values stand."""

    sweep: Sweep
    path: FilePath
    origins: Mapping[Path, Origin] = field(repr=False)
    traces: Mapping[str, RequestTrace] = field(default_factory=dict, repr=False)
    """The traces by their workload, as JSON."""

    def trace_of(self, workload: Workload) -> RequestTrace | None:
        """Return the trace of a workload; None: it has none."""
        return self.traces.get(workload.model_dump_json())

    @property
    def recipe(self) -> FilePath:
        return self.path.parent / self.sweep.recipe

    def locate_key(self, key: str) -> str:
        """Return where a key of the recipe stands: `sweep.yaml:7`."""
        group = "zip" if key in self.sweep.zip else "cross"
        return str(locate((group, key), self.origins) or self.path)


def load_sweep(path: FilePath) -> LoadedSweep:
    """Load the sweep file at `path`. RecipeError has all that is wrong at once. `${NAME}` in a value of the recipe is
    read where the recipe is."""
    document = recipe_document.read_file(path, "sweep file")
    if "model" in document.data and "recipe" not in document.data:
        raise RecipeError(
            "this is a recipe, not a sweep file",
            where=str(document.origins.get(("model",), path)),
            todo="a sweep file names it: `recipe: FILE`, with `workload`, `concurrency`, and `cross` or `zip`",
        )
    problems = list(document.problems)
    known_bad = set[Path]().union(*(p.spoils for p in problems))
    sweep, invalid = validate(Sweep, document.data, known_bad, _STAND_INS, document.spellings)
    problems += invalid
    if sweep is not None:
        bad = known_bad.union(*(p.spoils for p in invalid))
        problems += [p for p in _problems(sweep) if not any(p.concerns(b) for b in bad)]
    if problems or sweep is None:
        raise error(problems, document.origins, str(path))
    return _with_traces(sweep, path, document.origins)


def _with_traces(sweep: Sweep, path: FilePath, origins: Mapping[Path, Origin]) -> LoadedSweep:
    """Read the traces of a sweep now, so that a bad line is not found after hours. A trace is relative to the sweep
    file."""
    if problems := list(_missing_traces(sweep, path)):
        raise error(problems, origins, str(path))
    workloads: list[Workload] = []
    traces: dict[str, RequestTrace] = {}
    for workload in sweep.workload:
        if workload.trace is not None:
            beside = path.parent / workload.trace
            named = workload.model_copy(update={"trace": str(beside.absolute())}) if beside.exists() else workload
            known, trace = with_trace(named, path.parent)
            traces[known.model_dump_json()] = trace
            workloads.append(known)
        else:
            workloads.append(workload)
    loaded = LoadedSweep(sweep.model_copy(update={"workload": workloads}), path, origins, traces)
    problems = list(_sessions(loaded))
    if problems:
        raise error(problems, origins, str(path))
    return loaded


def _missing_traces(sweep: Sweep, path: FilePath) -> Iterator[Problem]:
    for index, workload in enumerate(sweep.workload):
        if workload.trace is None or workload.trace == AGENTIC:
            continue
        if not (file := path.parent / workload.trace).exists():
            todo = f"give a file, relative to this one, or {AGENTIC}, which pdserve has"
            yield Problem(("workload", index, "trace"), f"{file} does not exist", todo)


def _sessions(loaded: LoadedSweep) -> Iterator[Problem]:
    for index, workload in enumerate(loaded.sweep.workload):
        most, trace = max(loaded.sweep.concurrency, default=0), loaded.trace_of(workload)
        if trace is not None and most > len(trace.sessions):
            what = f"the trace has {len(trace.sessions)} sessions, which are never {most} at a time"
            yield Problem(("workload", index), what, "lower it, or take a longer trace", also=(("concurrency",),))


def _problems(sweep: Sweep) -> Iterator[Problem]:
    if not sweep.concurrency and not sweep.rate:
        yield Problem(
            ("concurrency",), "there is no load", also=(("rate",),), write=Line(("concurrency",), "[1, 4, 8]", True)
        )
    most = max(sweep.concurrency, default=0)
    if sweep.requests is not None and sweep.requests < most:
        yield Problem(
            ("requests",),
            f"{sweep.requests} requests are never {most} at a time",
            also=(("concurrency",),),
            write=Line(("requests",), str(most), example=True),
        )
    if sweep.grace_seconds is not None and sweep.seconds is None:
        yield Problem(("grace_seconds",), "it is the time after `seconds`", "give both, or none")
    for index, workload in enumerate(sweep.workload):
        if sweep.seconds is not None and workload.client == "vllm":
            what = "vllm bench serve cannot end after `seconds`"
            yield Problem(("workload", index, "client"), what, "client: aiperf", also=(("seconds",),))
    loads: list[tuple[Path, list[Any]]] = [(("concurrency",), list(sweep.concurrency)), (("rate",), list(sweep.rate))]
    for path, values in (*loads, *((("cross", key), values) for key, values in sweep.cross.items())):
        for index, value in enumerate(values):
            if value in values[:index]:
                yield Problem((*path, index), f"{show.value(value)} is there twice", "keep one of them")
    yield from _lengths(sweep)
    yield from _keys(sweep)


def _lengths(sweep: Sweep) -> Iterator[Problem]:
    lengths = {key: len(values) for key, values in sweep.zip.items()}
    if len(set(lengths.values())) > 1:
        seen = ", ".join(f"{key} has {count}" for key, count in lengths.items())
        yield Problem(("zip",), f"its lists have different lengths: {seen}", "give each as many values, or use `cross`")


def _keys(sweep: Sweep) -> Iterator[Problem]:
    """Yield keys that no point can set, and keys that are parts of another one: their order would decide."""
    before: list[tuple[Path, str]] = []
    for group, keys in (("zip", sweep.zip), ("cross", sweep.cross)):
        for key in keys:
            path: Path = (group, key)
            top = key.partition(".")[0]
            if top in _KEPT:
                yield Problem(path, f"{top} cannot be swept: {_KEPT[top]}", "remove this list")
            for other_path, other in before:
                if key == other or key.startswith(f"{other}.") or other.startswith(f"{key}."):
                    what = f"{key} and {other} set the same part of the recipe"
                    yield Problem(path, what, "keep one of the two", also=(other_path,))
            before.append((path, key))


Settings = tuple[tuple[str, str], ...]
"""Keys of a recipe and their values, as `--set KEY=VALUE` takes them."""
_DIGITS = 12


def combinations(sweep: Sweep) -> tuple[Settings, ...]:
    """Return what is set in each variant of the recipe: `zip` first with first, `cross` each with each."""
    zipped = list(zip(*sweep.zip.values(), strict=True)) if sweep.zip else [()]
    keys = (*sweep.zip, *sweep.cross)
    return tuple(
        tuple((key, yaml12.flow(value)) for key, value in zip(keys, (*first, *second), strict=True))
        for first, second in itertools.product(zipped, itertools.product(*sweep.cross.values()))
    )


@dataclass(frozen=True)
class Variant:
    """A variant of the recipe."""

    settings: Settings
    digest: str
    """The digest of the resolved recipe."""

    @property
    def title(self) -> str:
        return ", ".join(f"{key}={value}" for key, value in self.settings) or "the recipe as it is"


@dataclass(frozen=True)
class Point:
    """A workload under a load, on a deployment."""

    deployment: Variant
    workload: Workload
    load: Load

    @property
    def id(self) -> str:
        """Return an id that is the same for the same resolved recipe, workload and load, wherever it stands in the
        file."""
        about = {
            "recipe": self.deployment.digest,
            "workload": self._work(),
            "load": self.load.model_dump(mode="json"),
        }
        name = re.sub(r"[^a-z0-9.]+", "-", self.load.title.lower())
        return f"{name}-{_digest(about)}"

    def _work(self) -> dict[str, Any]:
        """Return the workload, with a trace by its name and digest: where it stands does not matter."""
        work = self.workload.model_dump(mode="json")
        return work | ({"trace": FilePath(self.workload.trace).name} if self.workload.trace is not None else {})

    @property
    def work(self) -> str:
        return self.workload.title

    @property
    def title(self) -> str:
        return f"{self.deployment.title}; {self.work}; {self.load.title}"


def recipe_digest(document: Mapping[str, Any], folder: str) -> str:
    """Return the digest of a resolved recipe. The order of keys means nothing; what is relative in it depends on its
    folder."""
    return _digest([document, folder])


def points(
    sweep: Sweep, digests: Sequence[tuple[Settings, str]], traces: Mapping[str, RequestTrace] | None = None
) -> tuple[Point, ...]:
    """Return all points, those of a deployment behind each other. Settings that resolve to the same recipe are the same
    deployment, that of the first of them. `digests`: of the recipe of each combination. `traces`: of the workloads that
    have one, by the workload as JSON."""
    deployments = {digest: settings for settings, digest in reversed(digests)}
    order = dict.fromkeys(digest for _, digest in digests)
    made = [
        Point(Variant(deployments[digest], digest), workload, load)
        for digest, workload in itertools.product(order, sweep.workload)
        for load in _loads(sweep, (traces or {}).get(workload.model_dump_json()))
    ]
    return tuple({point.id: point for point in made}.values())


def by_deployment(some: Sequence[Point]) -> list[tuple[Variant, list[Point]]]:
    """Return the points that follow each other, grouped by their deployment."""
    return [(key, list(group)) for key, group in itertools.groupby(some, key=lambda point: point.deployment)]


def _loads(sweep: Sweep, trace: RequestTrace | None) -> Iterator[Load]:
    each = [*((concurrency, None) for concurrency in sweep.concurrency), *((None, rate) for rate in sweep.rate)]
    requests = sweep.requests if trace is None else trace.requests
    for concurrency, rate in each:
        yield Load(
            requests=requests or usual_requests(concurrency or rate or 0),
            concurrency=concurrency,
            rate=rate,
            seconds=sweep.seconds,
            grace_seconds=sweep.grace_seconds,
        )


def _digest(data: Any) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:_DIGITS]


def letter(index: int) -> str:
    """Return a letter for a number: A to Z, then A1 and so on."""
    turn, place = divmod(index, 26)
    return f"{chr(ord('A') + place)}{turn or ''}"


def letters(points: Sequence[Point]) -> Mapping[Variant, str]:
    """Return a short name of each deployment, in the order of the points."""
    return {deployment: letter(index) for index, (deployment, _) in enumerate(by_deployment(points))}


_NAME_CHARACTERS, _ID_CHARACTERS = 48, 6
"""Length of the name of a deployment (pdserve.recipe.base), and of its id in it."""


@dataclass(frozen=True)
class PlannedSweep:
    """Holds what a sweep will run."""

    loaded: LoadedSweep
    points: tuple[Point, ...]
    """All of them, in their order."""
    recipes: Mapping[str, LoadedRecipe]
    """The recipes by the digest of their deployment."""
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
        return next(iter(kept_until_start(self.recipes[deployment.digest].recipe).values()), None)

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
