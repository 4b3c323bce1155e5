"""Results by what they are of. Two that a reader could not tell apart by what is varied are no repeats of each other: a
folder keeps what was measured on an earlier recipe, and two folders may hold the same sweep of two releases."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from pdserve.bench.compare import asked_of, keys_of
from pdserve.bench.result import BenchResult
from pdserve.bench.workload import Load, Workload
from pdserve.sweep.record import PointRecord

_DIGITS = 8


@dataclass(frozen=True)
class ReportedResult:
    """A result of `bench`, or a point of a sweep."""

    series: str
    """What is varied."""
    folder: Path
    """As it was given."""
    point: str
    """Its id; empty: it is no point."""
    workload: Workload
    loads: tuple[Load, ...]
    result: BenchResult | None
    """None: nothing was measured."""
    record: PointRecord | None
    """Of a point, or of the point that has this result."""
    run_id: str | None
    events: Path | None
    """The history of that run, if it was kept."""

    @property
    def identity(self) -> tuple[Path, str]:
        return self.folder, self.point

    @property
    def recipe(self) -> str:
        """A reader sees in the provenance what it is."""
        if self.result is None:
            return f"run {self.run_id}" if self.run_id is not None else "not measured"
        return f"recipe {_digest(self.result.provenance.recipe)}"


def distinct(sources: Sequence[ReportedResult]) -> list[ReportedResult]:
    """With more in the name of each series that has the same load twice, or several recipes in a folder: the folder,
    the recipe, then the point."""
    common = os.path.commonpath([source.folder.absolute() for source in sources]) if sources else ""

    def folder(source: ReportedResult) -> str:
        below = os.path.relpath(source.folder.absolute(), common)
        return source.folder.name if below == os.curdir else below

    named = list(sources)
    levels: list[Callable[[ReportedResult], str]] = [folder, lambda source: source.recipe, lambda source: source.point]
    for level in levels:
        for series in _unclear(named):
            if len({level(source) for source in named if source.series == series}) > 1:
                named = [
                    replace(source, series=f"{series}; {level(source)}") if source.series == series else source
                    for source in named
                ]
    return named


def _unclear(sources: Sequence[ReportedResult]) -> list[str]:
    """Series in which several results are of the same work at the same load, and those that have points of several
    recipes in a folder: the loads may be others since the recipe was edited."""
    same: dict[tuple[str, str, str], set[tuple[Path, str]]] = {}
    recipes: dict[tuple[str, Path], set[str]] = {}
    for source in sources:
        for load in source.loads:
            same.setdefault((source.series, source.workload.title, asked_of(load)), set()).add(source.identity)
        if source.result is not None:
            recipes.setdefault((source.series, source.folder), set()).add(source.recipe)
    unclear = [series for (series, _, _), its in same.items() if len(its) > 1]
    unclear += [series for (series, _), its in recipes.items() if len(its) > 1]
    return list(dict.fromkeys(unclear))


@cache
def _digest(recipe: str) -> str:
    """Of its keys but the name: each task of a Slurm array gives its deployment one of its own."""
    keys = {key: value for key, value in keys_of(recipe).items() if key != "name"}
    return hashlib.sha256(json.dumps(keys, sort_keys=True).encode()).hexdigest()[:_DIGITS]
