"""The sweep file: lists over keys of a recipe, workloads and loads. It is read as strictly as a recipe."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Annotated, Any, Literal

from pydantic import Field

from pdserve.bench.traces import agentic
from pdserve.bench.traces.trace import RequestTrace
from pdserve.bench.traces.use import with_trace
from pdserve.bench.workload import Workload
from pdserve.errors import RecipeError
from pdserve.recipe.base import Count, Name, Strict
from pdserve.recipe.load import extends, show
from pdserve.recipe.load.problems import Line, Origin, Path, Problem, error, locate
from pdserve.recipe.load.validation import validate

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
    """What is measured: every workload and load, on every combination of `zip` and `cross`."""

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
    """By the workload, as JSON."""

    def trace_of(self, workload: Workload) -> RequestTrace | None:
        """None: it has none."""
        return self.traces.get(workload.model_dump_json())

    @property
    def recipe(self) -> FilePath:
        return self.path.parent / self.sweep.recipe

    def locate_key(self, key: str) -> str:
        """`sweep.yaml:7` of a key of the recipe."""
        group = "zip" if key in self.sweep.zip else "cross"
        return str(locate((group, key), self.origins) or self.path)


def load_sweep(path: FilePath) -> LoadedSweep:
    """The sweep file at `path`. RecipeError has all that is wrong at once. `${NAME}` in a value of the recipe is read
    where the recipe is."""
    document = extends.read_file(path, "sweep file")
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
    """Traces are read now, so that a bad line is not found after hours. A trace is relative to the sweep file."""
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
        if workload.trace is None or workload.trace == agentic.NAME:
            continue
        if not (file := path.parent / workload.trace).exists():
            todo = f"give a file, relative to this one, or {agentic.NAME}, which pdserve has"
            yield Problem(("workload", index, "trace"), f"{file} does not exist", todo)


def _sessions(loaded: LoadedSweep) -> Iterator[Problem]:
    for index, workload in enumerate(loaded.sweep.workload):
        most, trace = max(loaded.sweep.concurrency, default=0), loaded.trace_of(workload)
        if trace is not None and most > trace.roots:
            what = f"the trace has {trace.roots} sessions, which are never {most} at a time"
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
    """Keys that no point can set, and those of which one is part of another: their order would decide."""
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
