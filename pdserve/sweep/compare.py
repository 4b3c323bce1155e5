"""The comparison of two results of `bench`, load by load, or of two sweeps, point by point: what differs in what was
measured, then the figures that differ by more than noise. Pure but for the reader."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pdserve.bench.figures import PERCENTILES, Figures, Spread
from pdserve.bench.result import BenchResult, Measurement, Provenance, Window, read_result
from pdserve.bench.workload import USUAL_GRACE, USUAL_OUTPUT, Load, Workload
from pdserve.errors import StateError
from pdserve.plan.frozen import Frozen
from pdserve.recipe.load.yaml12 import flow, parse
from pdserve.sweep.file import letter
from pdserve.sweep.record import POINT, PointRecord, records_in

Group = Literal["latencies", "rates", "requests", "engines and caches", "CPU"]
Better = Literal["less", "more"]


@dataclass(frozen=True)
class ComparedFigure:
    """Names a figure of a measurement, and says which way is better."""

    group: Group
    unit: str
    better: Better | None
    """None: a change of it is neither better nor worse by itself."""
    read: Callable[[Measurement], float | None]
    """None: it was not measured."""


def _latency(name: str, part: str) -> ComparedFigure:
    def read(measurement: Measurement) -> float | None:
        spread: Spread | None = getattr(measurement.figures, name)
        return None if spread is None else getattr(spread, part)

    return ComparedFigure("latencies", "ms", "less", read)


def _client(group: Group, unit: str, better: Better, read: Callable[[Figures], float | None]) -> ComparedFigure:
    return ComparedFigure(group, unit, better, lambda measurement: read(measurement.figures))


def _window(
    unit: str, better: Better | None, read: Callable[[Window], float | None], group: Group = "engines and caches"
) -> ComparedFigure:
    return ComparedFigure(group, unit, better, lambda measurement: read(measurement.window))


def _share(value: float | None) -> float | None:
    return None if value is None else 100 * value


def _preemptions(window: Window) -> float | None:
    counted = [role["preemptions"] for role in (window.prefill, window.decode) if "preemptions" in role]
    return sum(counted) if counted else None


FIGURES: Mapping[str, ComparedFigure] = {
    **{
        f"{title} {part}": _latency(name, part)
        for title, name in (("TTFT", "ttft"), ("ITL", "itl"), ("TPOT", "tpot"), ("E2E", "e2e"))
        for part in ("mean", *(f"p{percent}" for percent in PERCENTILES))
    },
    "requests": _client("rates", "requests/s", "more", lambda figures: figures.requests_per_second),
    "goodput": _client("rates", "requests/s", "more", lambda figures: figures.goodput),
    "output": _client("rates", "tokens/s", "more", lambda figures: figures.output_per_second),
    "total": _client("rates", "tokens/s", "more", lambda figures: figures.total_per_second),
    "output per GPU": _client("rates", "tokens/s", "more", lambda figures: figures.output_per_second_per_gpu),
    "total per GPU": _client("rates", "tokens/s", "more", lambda figures: figures.total_per_second_per_gpu),
    "1000/ITL p50": _client("rates", "tokens/s/user", "more", lambda figures: figures.interactivity_by_itl.get("p50")),
    "1000/mean TPOT": _client("rates", "tokens/s/user", "more", lambda figures: figures.interactivity_by_tpot),
    "answered": _client("requests", "requests", "more", lambda figures: float(figures.completed)),
    "failed": _client(
        "requests", "requests", "less", lambda figures: float(figures.requests - figures.completed - figures.cut)
    ),
    "cut": _client("requests", "requests", "less", lambda figures: float(figures.cut)),
    "prefix hit": _window("%", "more", lambda window: _share(window.prefix_hit)),
    "computed on prefill": _window("tokens", "less", lambda window: window.prefill.get("computed")),
    "loaded on prefill": _window("tokens", None, lambda window: window.prefill.get("received")),
    "LMCache had": _window("%", None, lambda window: _share(window.cache_hit)),
    "chunks stored": _window("chunks", None, lambda window: window.lmcache.get("written")),
    "chunks loaded": _window("chunks", None, lambda window: window.lmcache.get("read")),
    "chunks evicted": _window("chunks", "less", lambda window: window.lmcache.get("evicted")),
    "received by decode": _window("tokens", None, lambda window: window.decode.get("received")),
    "computed by decode": _window("tokens", "less", lambda window: window.decode.get("computed")),
    "KV moved": _window("MiB", None, lambda window: None if window.moved_bytes is None else window.moved_bytes / 2**20),
    "KV transfers": _window("s", "less", lambda window: window.moved_seconds),
    "preemptions": _window("requests", "less", _preemptions),
    "most running": _window("requests", None, lambda window: window.peaks.running),
    "most waiting": _window("requests", "less", lambda window: window.peaks.waiting),
    "fullest KV": _window("%", None, lambda window: _share(window.peaks.kv_usage)),
    "CPU of the client": _window("cores", "less", lambda window: window.client_cpu.used, "CPU"),
    "CPU of the proxy": _window("cores", "less", lambda window: window.proxy_cpu.used, "CPU"),
}
"""In the order in which they are shown."""
GROUPS: tuple[Group, ...] = tuple(dict.fromkeys(figure.group for figure in FIGURES.values()))

Judgement = Literal["real", "within noise", "not judged"]

_TITLES = {"git_revision": "commit of pdserve"}
"""What is called otherwise than in versions.json."""
_HOW = ("warmup", "max_failed", "session_header", "trace_block")
"""Settings of a workload that two results of the same work may have differently."""
_FEWEST = 2
"""Repeats on each side, of which there is a spread."""
_LEAST_CHANGE = 0.001
"""The least share of the larger mean: repeats that are equal by chance, or by rounding, have no noise at all."""
_T = (
    *(63.657, 9.925, 5.841, 4.604, 4.032, 3.707, 3.499, 3.355, 3.250, 3.169),
    *(3.106, 3.055, 3.012, 2.977, 2.947, 2.921, 2.898, 2.878, 2.861, 2.845),
    *(2.831, 2.819, 2.807, 2.797, 2.787, 2.779, 2.771, 2.763, 2.756, 2.750),
)
"""Student's t beyond which 1 % of all lie on both sides together, from 1 degree of freedom on. 1 % and not 5 %: a
comparison judges dozens of figures, and of those that are equal 1 in 20 would be called different."""
ANOTHER_START = "another start of the deployment"
"""What differs where the repeats of A and of B are of one start each."""
STARTS_NOTE = "Each side is one start of its deployment: what changes from start to start is not in the noise."


class Difference(Frozen):
    """Describes something that differs in what was measured. None: it is not there."""

    what: str
    a: str | None
    b: str | None
    points: tuple[str, ...] = ()
    """The letters of the points of two sweeps where it differs so."""


class FigureChange(Frozen):
    """A figure at a load: the mean over the valid repeats of each side."""

    group: Group
    figure: str
    unit: str
    good: Better | None
    """Which change of it is better; None: neither is by itself."""
    a: float
    b: float
    noise: float | None
    """Half of the 99 % interval of the difference (Welch); None: there are too few repeats."""
    judgement: Judgement

    @property
    def change(self) -> float | None:
        """Return the change as a share of A."""
        return (self.b - self.a) / self.a if self.a else None

    @property
    def noise_share(self) -> float | None:
        """Return the noise as a share of A."""
        return None if self.noise is None or not self.a else self.noise / abs(self.a)

    @property
    def better(self) -> bool | None:
        """Return whether B is better: less time, or more of a rate. None: it is neither better nor worse."""
        return None if self.good is None else (self.b < self.a) == (self.good == "less")

    @property
    def shown(self) -> str:
        """Return the judgement for a reader."""
        if self.judgement != "real":
            return self.judgement
        if self.better is None:
            return f"real: {'less' if self.b < self.a else 'more'}"
        return f"real: {'better' if self.better else 'worse'}"

    @property
    def zero(self) -> bool:
        """Return whether nothing of the figure was counted on both sides."""
        return not self.a and not self.b


class ComparedPoint(Frozen):
    """Holds a load, or a point of two sweeps, that both sides have measured."""

    letter: str
    title: str
    changes: tuple[FigureChange, ...]

    @property
    def verdict(self) -> str:
        """Say in a line what has changed at this point."""
        judged = _judged(self.changes)
        real = [change for change in judged if change.judgement == "real"]
        if not judged:
            return "not judged: too few repeats"
        if not real:
            return f"none of {len(judged)} figures changed by more than noise"
        return f"{len(real)} of {len(judged)} figures changed: {_sides(real)}"


class Comparison(Frozen):
    """Holds all of a comparison, in the order in which it is read."""

    differences: tuple[Difference, ...]
    points: tuple[ComparedPoint, ...]
    left_out: tuple[str, ...]
    """Loads, points and repeats that are not compared, and why."""

    @property
    def verdict(self) -> str:
        """Say in a few sentences what has changed."""
        judged = _judged(change for point in self.points for change in point.changes)
        if not judged:
            return "Nothing can be judged: see below."
        real = [change for change in judged if change.judgement == "real"]
        where = f" at {len(self.points)} points" if len(self.points) > 1 else ""
        text = f"{len(real) or 'None'} of {len(judged)} figures{where} changed by more than the noise over repeats"
        text += f": B is {_sides(real)}" if real else ""
        # 99 % intervals. A figure without noise is never called different by chance.
        chance = sum(bool(change.noise) for change in judged) / 100
        text += f". Of figures that did not change, about one in a hundred is called changed: here {chance:.1f}."
        return f"{text} {STARTS_NOTE}" if any(each.what == ANOTHER_START for each in self.differences) else text


def _judged(changes: Iterable[FigureChange]) -> list[FigureChange]:
    return [change for change in changes if change.judgement != "not judged" and not change.zero]


def _sides(real: Sequence[FigureChange]) -> str:
    better, worse, neither = (sum(change.better is kind for change in real) for kind in (True, False, None))
    return f"better in {better} and worse in {worse}" + (f", neither in {neither}" if neither else "")


def shown_groups(changes: Sequence[FigureChange]) -> Mapping[Group, Sequence[FigureChange]]:
    """Return the changes of a load by their groups, as a table has them: without those that are 0 on both sides."""
    groups: dict[Group, list[FigureChange]] = {}
    for change in changes:
        if not change.zero:
            groups.setdefault(change.group, []).append(change)
    return groups


def uncounted_figures(changes: Sequence[FigureChange]) -> Sequence[str]:
    """Return the changes of a load of which nothing was counted on both sides."""
    return [change.figure for change in changes if change.zero]


def compare(a: BenchResult, b: BenchResult) -> Comparison:
    """Compare two results, load by load. Raises StateError when they were not asked for the same work."""
    if (asked := work_of(a.workload)) != (other := work_of(b.workload)):
        raise StateError(
            f"the two results are of different work: {asked}, and {other}",
            cause="figures of other prompts, answers or limits show nothing of the deployment",
            todo="measure both with the same --input-tokens and --output-tokens, or --trace; --seed and --slo",
        )
    points: list[ComparedPoint] = []
    left_out: list[str] = []
    ours, theirs = _by_load(a), _by_load(b)
    for load in dict.fromkeys((*ours, *theirs)):
        if lacking := [name for name, loads in (("A", ours), ("B", theirs)) if load not in loads]:
            left_out.append(f"{load}: {lacking[0]} has no measurement of it")
        else:
            _add_point(points, load, ours[load], theirs[load], left_out)
    return Comparison(differences=tuple(_differences(a, b)), points=tuple(points), left_out=tuple(left_out))


def _add_point(
    points: list[ComparedPoint], title: str, a: Sequence[Measurement], b: Sequence[Measurement], left_out: list[str]
) -> bool:
    """Compare the valid repeats of a load, and return whether both sides have any. `left_out` gets the others."""
    both = []
    for name, measured in (("A", a), ("B", b)):
        valid = [measurement for measurement in measured if measurement.verdict.valid]
        if len(valid) < len(measured):
            checks = ", ".join(dict.fromkeys(reason.check for each in measured for reason in each.verdict.reasons))
            lost = f"{len(measured) - len(valid)} of {len(measured)} repeats of {name} are INVALID"
            left_out.append(f"{title}: {lost} ({checks})")
        both.append(valid)
    if not all(both):
        return False
    points.append(ComparedPoint(letter=letter(len(points)), title=title, changes=tuple(_changes(*both))))
    return True


def _changes(a: Sequence[Measurement], b: Sequence[Measurement]) -> Iterator[FigureChange]:
    for title, figure in FIGURES.items():
        left, right = (
            [value for measurement in side if (value := figure.read(measurement)) is not None] for side in (a, b)
        )
        if left and right:
            noise, judgement = judge_change(left, right)
            yield FigureChange(
                group=figure.group,
                figure=title,
                unit=figure.unit,
                good=figure.better,
                a=statistics.fmean(left),
                b=statistics.fmean(right),
                noise=noise,
                judgement=judgement,
            )


def judge_change(a: Sequence[float], b: Sequence[float]) -> tuple[float | None, Judgement]:
    """Return the noise of the difference of two means, and whether the difference exceeds it and is no trifle."""
    if min(len(a), len(b)) < _FEWEST:
        return None, "not judged"
    parts = [statistics.variance(values) / len(values) for values in (a, b)]
    if not sum(parts):
        noise = 0.0
    else:
        # Welch and Satterthwaite: the two sides may spread differently.
        below = sum(part**2 / (len(values) - 1) for part, values in zip(parts, (a, b), strict=True))
        noise = quantile(sum(parts) ** 2 / below) * math.sqrt(sum(parts))
    means = statistics.fmean(a), statistics.fmean(b)
    least = max(noise, _LEAST_CHANGE * max(map(abs, means)))
    return noise, "real" if abs(means[1] - means[0]) > least else "within noise"


def quantile(freedom: float) -> float:
    """Return the t of so many degrees of freedom, 1 at least. Between two whole ones it is on the line, and beyond the
    table its last: a little more than the exact one, never less."""
    whole = int(freedom)
    if whole >= len(_T):
        return _T[-1]
    return _T[whole - 1] + (freedom - whole) * (_T[whole] - _T[whole - 1])


def work_of(work: Workload) -> str:
    """Return what decides the figures of a load: two results in which it is the same can be compared."""
    slo = ", ".join(f"{name} {limit:g} ms" for name, limit in sorted(work.slo.items())) or "none"
    if work.trace is not None:
        # The answers whose length the trace does not have.
        out = work.output_tokens or USUAL_OUTPUT
        return f"{work.title} ({(work.trace_digest or '')[:12]}), {out} out, seed {work.seed}, SLO {slo}"
    return f"{work.input_tokens} tokens in, {work.output_tokens} out, seed {work.seed}, SLO {slo}"


def asked_of(load: Load) -> str:
    """Return what two measurements of the same load were both asked for. With less grace, long answers are cut and in
    no figure."""
    parts = [load.title, f"{load.requests} requests"]
    if load.seconds is not None:
        parts += [f"{load.seconds:g} s", *([f"{load.grace:g} s of grace"] if load.grace != USUAL_GRACE else [])]
    return ", ".join(parts)


def _by_load(result: BenchResult) -> dict[str, list[Measurement]]:
    loads: dict[str, list[Measurement]] = {}
    for measurement in result.measurements:
        loads.setdefault(asked_of(measurement.load), []).append(measurement)
    return loads


def facts_of(about: Provenance) -> dict[str, str | None]:
    """Return what decides the figures, in the order in which it is read: versions, hardware, what was planned, client,
    keys of the recipe."""
    # The host is hardware; versions.json has it because each of its lines was read there.
    versions = {name: value for name, value in about.versions.items() if name != "host"}
    return {
        **{_TITLES.get(name, f"version of {name}"): value for name, value in versions.items()},
        **{f"hardware: {name}": value for name, value in about.hardware.items()},
        **{f"planned: {name}": value for name, value in about.planned.items()},
        "client": about.client,
        **{f"recipe: {key}": value for key, value in keys_of(about.recipe).items()},
        "tokenizer of the client": about.tokenizer,
    }


def _differences(a: BenchResult, b: BenchResult) -> Iterator[Difference]:
    ours, theirs = facts_of(a.provenance), facts_of(b.provenance)
    for side, work in ((ours, a.workload), (theirs, b.workload)):
        side |= {f"workload: {name}": str(value) for name in _HOW if (value := getattr(work, name)) is not None}
    if a.provenance.run_id != b.provenance.run_id:
        ours[ANOTHER_START], theirs[ANOTHER_START] = a.provenance.run_id, b.provenance.run_id
    for name in sorted(dict.fromkeys((*ours, *theirs)), key=_place):
        if ours.get(name) != theirs.get(name):
            yield Difference(what=name, a=ours.get(name), b=theirs.get(name))


def _place(name: str) -> int:
    """Return the place of a fact, so that one which only one of two results has is shown among its own kind."""
    kinds = ("hardware: ", "planned: ", "client", "recipe: ", "tokenizer", "workload: ", ANOTHER_START)
    return next((place for place, kind in enumerate(kinds, 1) if name.startswith(kind)), 0)


def keys_of(recipe: str) -> dict[str, str]:
    """Return the dotted keys of a recipe with their values. Raises RecipeError for what is no YAML."""
    keys: dict[str, str] = {}

    def walk(value: Any, path: str) -> None:
        if isinstance(value, Mapping) and value:
            for name, below in value.items():
                walk(below, f"{path}.{name}" if path else str(name))
        elif isinstance(value, list) and value:
            for number, below in enumerate(value):
                walk(below, f"{path}[{number}]")
        elif value is not None:  # null: it is not set
            keys[path] = flow(value)

    if recipe:
        walk(parse(recipe, "recipe.yaml").data, "")
    return keys


Key = tuple[tuple[tuple[str, str | None], ...], str, str]
"""What the points of two sweeps are matched by: varied settings of the recipe, work, load."""


@dataclass(frozen=True)
class MeasuredPoint:
    """A point that is over, and its result, if it has one."""

    record: PointRecord
    result: BenchResult | None
    written: float = 0.0
    """When its record was, wall-clock seconds."""


def is_sweep(path: Path) -> bool:
    """Return whether this is the folder of a sweep."""
    return (path / "points").is_dir()


def read_sweep(folder: Path) -> tuple[MeasuredPoint, ...]:
    """Read the measured points of a sweep. Raises StateError when there is none, and for a record that cannot be
    read."""
    records = records_in(folder)
    if not records:
        raise StateError(
            "there is no sweep with points here, and no result of a benchmark",
            where=str(folder),
            cause="the folder does not exist, or has no points that are over",
            todo="give the folder that `pdserve sweep` or `pdserve bench` has printed",
        )
    return tuple(
        MeasuredPoint(
            record,
            None if record.result is None else read_result(place, str(place / record.result)),
            (place / POINT).stat().st_mtime,
        )
        for place, record in records.items()
    )


def compare_sweeps(a: Sequence[MeasuredPoint], b: Sequence[MeasuredPoint]) -> Comparison:
    """Compare two sweeps, point by point. Points are the same where the keys that vary in one of the two have the same
    values, and work and load are the same. What is the same at all points of a sweep may differ between the two: it is
    named first."""
    keys = varied_keys([point.record for point in a]) | varied_keys([point.record for point in b])
    points: list[ComparedPoint] = []
    left_out: list[str] = []
    ours, theirs = (_by_key(side, name, keys, left_out) for side, name in ((a, "A"), (b, "B")))
    found: dict[tuple[str, str | None, str | None], list[str]] = {}
    starts: list[Difference] = []
    for key in dict.fromkeys((*ours, *theirs)):
        left, right = ours.get(key), theirs.get(key)
        lacking = [why for name, point in (("A", left), ("B", right)) if (why := _why_lacking(name, point))]
        if left is None or right is None or left.result is None or right.result is None:
            left_out.append(f"{_title(key)}: {'; '.join(lacking)}")
        elif _add_point(points, _title(key), left.result.measurements, right.result.measurements, left_out):
            for each in _differences(left.result, right.result):
                if each.what == ANOTHER_START:
                    starts.append(each)
                else:
                    found.setdefault((each.what, each.a, each.b), []).append(points[-1].letter)
    differences = [Difference(what=what, a=x, b=y, points=tuple(at)) for (what, x, y), at in found.items()]
    if starts:  # every deployment of a sweep has starts of its own
        sides = [{each.a for each in starts}, {each.b for each in starts}]
        x, y = (next(iter(side)) if len(side) == 1 else f"{len(side)} starts" for side in sides)
        differences.append(Difference(what=ANOTHER_START, a=x, b=y))
    return Comparison(differences=tuple(differences), points=tuple(points), left_out=tuple(left_out))


def varied_keys(records: Sequence[PointRecord]) -> set[str]:
    """Return the keys of the recipe that do not have one value at all points."""
    settings = [dict(record.settings) for record in records]
    return {key for each in settings for key in each if len({one.get(key) for one in settings}) > 1}


def _by_key(
    points: Sequence[MeasuredPoint], name: str, keys: set[str], left_out: list[str]
) -> Mapping[Key, MeasuredPoint]:
    """Return the points by their keys in the order of settings, works and loads; the newest of those that are the same:
    a folder keeps what was measured on an earlier recipe."""

    def place(point: MeasuredPoint) -> tuple[str, str, float, int, float]:
        settings, work, _ = _key(point.record, keys)
        load = point.record.load
        return str(settings), work, load.rate or 0, load.concurrency or 0, point.written

    chosen: dict[Key, MeasuredPoint] = {}
    for point in sorted(points, key=place):
        key = _key(point.record, keys)
        if key in chosen:
            left_out.append(f"{_title(key)}: {name} has it several times: the newest counts")
        chosen[key] = point
    return chosen


def _key(record: PointRecord, keys: set[str]) -> Key:
    settings = dict(record.settings)
    return tuple((key, settings.get(key)) for key in sorted(keys)), work_of(record.workload), asked_of(record.load)


def _title(key: Key) -> str:
    settings = [f"{name}={value}" for name, value in key[0] if value is not None]
    return "; ".join([*([", ".join(settings)] if settings else []), key[1], key[2]])


def _why_lacking(name: str, point: MeasuredPoint | None) -> str:
    """Return why one side has no figures of a point; empty: it has."""
    if point is None:
        return f"{name} has no such point"
    checks = ", ".join(dict.fromkeys(reason.check for reason in point.record.reasons))
    return "" if point.result is not None else f"{name} was not measured ({checks})"
