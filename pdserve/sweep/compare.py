"""Two sweeps beside each other: their points matched by what they set and what was asked of them, each pair compared as
two benchmarks are. Pure but for the reader."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pdserve.bench.compare import (
    ANOTHER_START,
    STARTS_NOTE,
    Difference,
    FigureChange,
    asked_of,
    compare,
    count_changes,
    count_sides,
    work_of,
)
from pdserve.bench.result import BenchResult, read_result
from pdserve.bench.workload import Workload
from pdserve.errors import StateError
from pdserve.plan.frozen import Frozen
from pdserve.sweep.file import letter
from pdserve.sweep.record import POINT, PointRecord, records_in

Key = tuple[tuple[tuple[str, str | None], ...], str, str]
"""What the points of two sweeps are matched by: varied settings of the recipe and of the workload, work, load."""
_WORK = "workload."
"""How settings of the workload begin, beside keys of the recipe."""
_RUN_TIME = "%Y%m%d-%H%M%S"
"""How the id of a run begins (pdserve.run.directory)."""


@dataclass(frozen=True)
class MeasuredPoint:
    """A point that is over, and its result, if it has one."""

    record: PointRecord
    result: BenchResult | None
    written: float = 0.0
    """When its record was, wall-clock seconds."""


class SweepDifference(Frozen):
    """Describes something that differs in what was measured, and the points where it differs so."""

    difference: Difference
    points: tuple[str, ...]
    """Their letters."""


class PointPair(Frozen):
    """Holds a point that both sweeps have measured."""

    letter: str
    title: str
    changes: tuple[FigureChange, ...]
    left_out: tuple[str, ...]
    """Repeats that are not compared, and why."""

    @property
    def verdict(self) -> str:
        """Say in a line what has changed at this point."""
        judged = [change for change in self.changes if change.judgement != "not judged" and not change.zero]
        if not self.changes:
            return "nothing to compare"
        if not judged:
            return "not judged: too few repeats"
        real = [change for change in judged if change.judgement == "real"]
        if not real:
            return f"none of {len(judged)} figures changed by more than noise"
        better, worse, neither = count_sides(real)
        text = f"{len(real)} of {len(judged)} figures changed: {better} better, {worse} worse"
        return f"{text}, {neither} neither" if neither else text


class SweepComparison(Frozen):
    """Holds all of a comparison of two sweeps, in the order in which it is read."""

    differences: tuple[SweepDifference, ...]
    pairs: tuple[PointPair, ...]
    unmatched: tuple[str, ...]
    """Points that one of the two lacks, or that do not count, and why."""

    @property
    def verdict(self) -> str:
        """Say in a few sentences what has changed."""
        changes = [change for pair in self.pairs for change in pair.changes]
        parts = [count_changes(changes, f" at {len(self.pairs)} points") or "Nothing can be judged: see below."]
        parts += [STARTS_NOTE] if any(each.difference.what == ANOTHER_START for each in self.differences) else []
        return " ".join(parts)


def is_sweep(path: Path) -> bool:
    """Return whether this is the folder of a sweep."""
    return (path / "points").is_dir()


def read_sweep(folder: Path) -> tuple[MeasuredPoint, ...]:
    """Read the measured points of a sweep. Raises StateError when there is none, and for a record that cannot be
    read."""
    records = records_in(folder)
    if not records:
        raise StateError(
            "there is no sweep with points here",
            where=str(folder),
            todo="give the folder that `pdserve sweep` has printed",
        )
    return tuple(
        MeasuredPoint(
            record, None if record.result is None else _result(place / record.result), (place / POINT).stat().st_mtime
        )
        for place, record in records.items()
    )


def compare_sweeps(a: Sequence[MeasuredPoint], b: Sequence[MeasuredPoint]) -> SweepComparison:
    """Compare two sweeps, point by point. Points are the same where the keys that vary in one of the two have the same
    values, and work and load are the same. What is the same at all points of a sweep may differ between the two: it is
    named first."""
    keys = _varied(a) | _varied(b)
    unmatched: list[str] = []
    matched = [_by_key(side, name, keys, unmatched) for side, name in ((a, "A"), (b, "B"))]
    pairs: list[PointPair] = []
    found: dict[tuple[str, str | None, str | None], list[str]] = {}
    starts: list[tuple[str, Difference]] = []
    for key in dict.fromkeys((*matched[0], *matched[1])):
        ours, theirs = matched[0].get(key), matched[1].get(key)
        title = _title(key)
        if ours is None or theirs is None:
            unmatched.append(f"{title}: {'A' if ours is None else 'B'} has no such point")
            continue
        lacking = [why for name, point in (("A", ours), ("B", theirs)) if (why := _not_counted(name, point))]
        if lacking or ours.result is None or theirs.result is None:
            unmatched.append(f"{title}: {'; '.join(lacking)}")
            continue
        here = letter(len(pairs))
        compared = compare(ours.result, theirs.result)
        pairs.append(PointPair(letter=here, title=title, changes=compared.changes, left_out=compared.left_out))
        for each in compared.differences:
            if each.what == ANOTHER_START:
                starts.append((here, each))
            else:
                found.setdefault((each.what, each.a, each.b), []).append(here)
    differences = [
        SweepDifference(difference=Difference(what=what, a=left, b=right), points=tuple(points))
        for (what, left, right), points in found.items()
    ]
    if starts:
        differences.append(_other_starts(starts))
    return SweepComparison(differences=tuple(differences), pairs=tuple(pairs), unmatched=tuple(unmatched))


def _other_starts(some: Sequence[tuple[str, Difference]]) -> SweepDifference:
    """Join the differences of starts: every deployment of a sweep has starts of its own."""
    runs = [{each.a for _, each in some}, {each.b for _, each in some}]
    a, b = (next(iter(side)) if len(side) == 1 else f"{len(side)} starts" for side in runs)
    return SweepDifference(difference=Difference(what=ANOTHER_START, a=a, b=b), points=tuple(at for at, _ in some))


def _result(folder: Path) -> BenchResult:
    return read_result(folder, str(folder))


def _varied(points: Sequence[MeasuredPoint]) -> set[str]:
    """Return the keys of the recipe that do not have one value at all points; and settings of the workload (its client,
    warm-ups) that are not the same at points which are the same work on the same recipe."""
    settings = [dict(point.record.settings) for point in points]
    keys = {key for each in settings for key in each if len({one.get(key) for one in settings}) > 1}
    same: dict[Key, list[Mapping[str, str | None]]] = {}
    for point in points:
        same.setdefault(_key(point.record, keys), []).append(_how(point.record.workload))
    how = {key for group in same.values() for key in group[0] if len({one[key] for one in group}) > 1}
    return keys | how


def _how(work: Workload) -> Mapping[str, str | None]:
    """Return how a workload is measured. A trace is known by its name and digest, wherever it stands."""
    values = work.model_dump(mode="json", exclude={"trace"})
    return {f"{_WORK}{name}": None if value is None else str(value) for name, value in values.items()}


def _by_key(
    points: Sequence[MeasuredPoint], name: str, keys: set[str], left_out: list[str]
) -> Mapping[Key, MeasuredPoint]:
    """Return the points by their keys, the newest of those that are the same: a folder keeps what was measured on an
    earlier recipe."""
    chosen: dict[Key, MeasuredPoint] = {}
    for point in sorted(points, key=_began):
        key = _key(point.record, keys)
        if key in chosen:
            left_out.append(f"{_title(key)}: {name} has it several times, of different recipes: the newest counts")
        chosen[key] = point
    return {key: chosen[key] for key in _in_order(points, keys)}


def _in_order(points: Sequence[MeasuredPoint], keys: set[str]) -> Iterator[Key]:
    """Yield the keys of points in the order of their settings, works and loads."""
    every = dict.fromkeys(_key(point.record, keys) for point in points)
    loads = {_key(point.record, keys): point.record.load for point in points}
    yield from sorted(
        every, key=lambda key: (str(key[0]), key[1], loads[key].rate or 0, loads[key].concurrency or 0, key[2])
    )


def _began(point: MeasuredPoint) -> tuple[float, float]:
    """Return the time at which the deployment of a point was started, with a result or without: a failed start counts
    like any other. Of two points of one start, the one that was over first comes first."""
    return _started(point), point.written


def _started(point: MeasuredPoint) -> float:
    """Return when a point's deployment was started; where it never was, or its run has a name of its own, the next best
    moment."""
    with suppress(ValueError):
        return time.mktime(time.strptime((point.record.run_id or "").rpartition("-")[0], _RUN_TIME))
    return point.written if point.result is None else point.result.provenance.began


def _key(record: PointRecord, keys: set[str]) -> Key:
    settings = {**dict(record.settings), **_how(record.workload)}
    return tuple((key, settings.get(key)) for key in sorted(keys)), work_of(record.workload), asked_of(record.load)


def _title(key: Key) -> str:
    settings = [f"{name}={value}" for name, value in key[0] if value is not None]
    return "; ".join([*([", ".join(settings)] if settings else []), key[1], key[2]])


def _not_counted(name: str, point: MeasuredPoint) -> str | None:
    """Return why the figures of a point are not compared. Repeats that are INVALID by themselves are left out one by
    one."""
    record = point.record
    if point.result is None:
        checks = ", ".join(dict.fromkeys(reason.check for reason in record.reasons))
        return f"{name} was not measured ({checks})"
    of_repeats = [reason for each in point.result.measurements for reason in each.verdict.reasons]
    own = [reason.check for reason in record.reasons if reason not in of_repeats and reason.check != "repeats"]
    if own:
        return f"{name} is INVALID ({', '.join(dict.fromkeys(own))})"
    if not any(each.verdict.valid for each in point.result.measurements):
        checks = ", ".join(dict.fromkeys(reason.check for reason in of_repeats))
        return f"all repeats of {name} are INVALID ({checks})"
    return None
