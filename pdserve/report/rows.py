"""The contents of a report: a row for each measurement with its verdict, what was measured on what, and timelines."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any, Literal

from pdserve.bench.result import EVENTS, RESULT, BenchResult, Measurement, Provenance, fixed_circumstances, read_result
from pdserve.bench.validity import Reason
from pdserve.bench.workload import Load, Workload
from pdserve.run import history
from pdserve.run.history import incident
from pdserve.sweep.compare import facts_of, keys_of, read_sweep, varied_keys
from pdserve.sweep.file import letter
from pdserve.sweep.record import PointRecord, SweepFolder

LaneState = Literal["starting", "ready", "silent", "dead", "stopping"]
DEPLOYMENT = "deployment"
"""The lane of all together."""
_STATES: Mapping[str, LaneState | None] = {
    "start": "starting",
    "started": "starting",
    "ready": "ready",
    "responsive": "ready",
    "unresponsive": "silent",
    "died": "dead",
    "late": "dead",
    "given_up": "dead",
    "cache_down": "dead",
    "restarting": "dead",
    "stop": "stopping",
    "stopped": None,
    "failed": "dead",
    "agent_gone": "dead",
    "down": None,
}
"""What an event makes of its lane; None: it is over."""
_DEATHS = ("died", "late", "given_up", "failed", "agent_gone")
_PHASES: Mapping[str, LaneState | None] = {
    "starting": "starting",
    "ready": "ready",
    "degraded": "silent",
    "failed": "dead",
    "draining": "stopping",
    "stopped": None,
}


@dataclass(frozen=True)
class LaneSpan:
    """Holds a state of a lane, in seconds since the beginning."""

    state: LaneState
    began: float
    ended: float


@dataclass
class Lane:
    """Holds the states of a process."""

    name: str
    spans: list[LaneSpan] = field(default_factory=list)
    deaths: list[float] = field(default_factory=list)
    _state: LaneState | None = None
    _since: float = 0.0

    def turn(self, state: LaneState | None, at: float) -> None:
        """Turn to a state, which holds from `at` on."""
        if state == self._state:
            return
        if self._state is not None and at > self._since:
            self.spans.append(LaneSpan(self._state, self._since, at))
        self._state, self._since = state, at

    def dead(self) -> bool:
        return self._state in (None, "dead", "stopping")


@dataclass(frozen=True)
class MeasuredSpan:
    """Places a measurement: by the wall clock, in a timeline in seconds since its beginning."""

    began: float
    ended: float
    title: str
    valid: bool


@dataclass(frozen=True)
class Timeline:
    """Holds what happened to the processes of a run."""

    run_id: str
    of: str
    """What was measured on it."""
    began: float
    """Wall-clock seconds."""
    seconds: float
    lanes: tuple[Lane, ...]
    windows: tuple[MeasuredSpan, ...]
    incidents: tuple[tuple[float, str], ...]
    """Seconds since the beginning, and what happened."""


def timeline(
    run_id: str, of: str, events: Sequence[Mapping[str, Any]], measured: Sequence[MeasuredSpan]
) -> Timeline | None:
    """Make the timeline of a run; None: nothing is known of it. The end is the last event, or the end of the last
    measurement."""
    times = [float(event["at"]) for event in events if event["event"] != "unreadable"]
    times += [at for each in measured for at in (each.began, each.ended)]
    if not events or not times:
        return None
    first, last = min(times), max(times)
    lanes: dict[str, Lane] = {DEPLOYMENT: Lane(DEPLOYMENT)}
    lanes[DEPLOYMENT].turn("starting", 0.0)
    nodes: dict[str, str] = {}
    incidents = []
    for event in events:
        at = float(event["at"]) - first
        if (what := incident(event)) is not None:
            why = event.get("how") or event.get("why")
            incidents.append((at, f"{what}: {why}" if why else what))
        for name in _concerned(event, nodes, lanes):
            _apply(lanes.setdefault(name, Lane(name)), event, at)
    for lane in lanes.values():
        lane.turn(None, last - first)
    windows = tuple(replace(each, began=each.began - first, ended=each.ended - first) for each in measured)
    drawn = tuple(lane for lane in lanes.values() if lane.spans or lane.deaths)
    return Timeline(run_id, of, first, last - first, drawn, windows, tuple(incidents))


def _concerned(event: Mapping[str, Any], nodes: dict[str, str], lanes: Mapping[str, Lane]) -> Iterable[str]:
    """Return the lanes that an event is about. `nodes`: of each process, as far as it is known."""
    kind, name = event["event"], event.get("name")
    if kind in ("phase", "failed", "down"):
        return [DEPLOYMENT]
    if kind == "agent_gone":
        # With its agent all processes of a node are gone.
        return [each for each, node in nodes.items() if node == event.get("node") and not lanes[each].dead()]
    if not isinstance(name, str) or kind not in _STATES:
        return []
    if isinstance(node := event.get("node"), str):
        nodes[name] = node
    return [name]


def _apply(lane: Lane, event: Mapping[str, Any], at: float) -> None:
    kind = event["event"]
    if kind in _DEATHS and at not in lane.deaths:
        lane.deaths.append(at)
    if kind == "phase":
        lane.turn(_PHASES.get(str(event.get("phase"))), at)
    else:
        # A command that has ended as it should is over, not ready.
        lane.turn(None if kind == "ready" and event.get("done") else _STATES[kind], at)


LACKING = "not there"
"""What a reader sees where a result lacks something."""


@dataclass(frozen=True)
class ProvenanceView:
    """Compares the provenance of all results of a page."""

    times: tuple[str, ...]
    """UTC, sorted."""
    shared: Mapping[str, str]
    """Versions and hardware; the keys of a recipe are in its own text."""
    differs: Mapping[str, Mapping[str, tuple[str, ...]]]
    """Value -> who has it."""
    recipes: Mapping[str, tuple[str, ...]]
    """Text -> who has it."""
    mixed: tuple[str, ...] = ()
    """What no sweep varies (pdserve.bench.result.fixed_circumstances) and is not the same for all."""


def provenance_view(some: Sequence[tuple[str, Provenance]]) -> ProvenanceView:
    """Compare where results come from: what is the same, and what differs. `some`: a name, and what was measured under
    it; a name may stand there several times."""
    facts = [(name, facts_of(about)) for name, about in some]
    values: dict[str, dict[str, dict[str, None]]] = {}
    for fact in dict.fromkeys(fact for _, each in facts for fact in each):
        for name, each in facts:
            values.setdefault(fact, {}).setdefault(each.get(fact) or LACKING, {})[name] = None
    recipes: dict[str, dict[str, None]] = {}
    for name, about in some:
        recipes.setdefault(about.recipe, {})[name] = None
    return ProvenanceView(
        times=tuple(
            datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M UTC")
            for at in sorted(about.began for _, about in some)
        ),
        shared={
            fact: next(iter(seen))
            for fact, seen in values.items()
            if len(seen) == 1 and LACKING not in seen and not fact.startswith("recipe: ")
        },
        differs={
            fact: {value: tuple(names) for value, names in seen.items()}
            for fact, seen in values.items()
            if len(seen) > 1
        },
        recipes={text: tuple(names) for text, names in recipes.items()},
        mixed=_mixed([fixed_circumstances(about) for _, about in some]),
    )


def _mixed(some: Sequence[Mapping[str, str]]) -> tuple[str, ...]:
    """Return the names of what two of them know otherwise."""
    values: dict[str, set[str]] = {}
    for name, value in (pair for each in some for pair in each.items()):
        values.setdefault(name, set()).add(value)
    return tuple(name for name, seen in values.items() if len(seen) > 1)


_DIGITS = 8


@dataclass(frozen=True)
class ReportedResult:
    """A result of `bench`, or a point of a sweep."""

    series: str
    """What is varied."""
    folder: Path
    """The folder that the user named."""
    result: BenchResult | None
    """None: nothing was measured."""
    record: PointRecord | None
    """The record of a point."""
    run_id: str | None
    events: Path
    """The history of that run, if it was kept."""


def name_apart(sources: Sequence[ReportedResult]) -> list[ReportedResult]:
    """Name the series apart: by their folder those that are in several, and by their recipe those that were measured
    with several, before it was edited and after. A reader sees in the provenance what each recipe is."""
    common = os.path.commonpath([source.folder.absolute() for source in sources]) if sources else ""

    def folder(source: ReportedResult) -> str | None:
        below = os.path.relpath(source.folder.absolute(), common)
        return source.folder.name if below == os.curdir else below

    def recipe(source: ReportedResult) -> str | None:
        return None if source.result is None else f"recipe {_digest(source.result.provenance.recipe)}"

    named = list(sources)
    for level in (folder, recipe):
        names: dict[str, set[str]] = {}
        for source in named:
            names.setdefault(source.series, set()).update(filter(None, [level(source)]))
        named = [
            replace(source, series=f"{source.series}; {name}")
            if (name := level(source)) is not None and len(names[source.series]) > 1
            else source
            for source in named
        ]
    return named


@cache
def _digest(recipe: str) -> str:
    """Return the digest of a recipe's keys but the name: each task of a Slurm array gives its deployment one of its
    own."""
    keys = {key: value for key, value in keys_of(recipe).items() if key != "name"}
    return hashlib.sha256(json.dumps(keys, sort_keys=True).encode()).hexdigest()[:_DIGITS]


CACHES = ("engine's own cache", "cache tier")
SOURCES = (*CACHES, "computed")
STAGES = ("queue", "prefill", "transfer", "decode")


def prompt_sources(each: Measurement) -> Mapping[str, float]:
    """Return the per cent of the prompt tokens on prefill by where they came from; empty: the engines do not count
    them."""
    prefill = each.window.prefill
    counted = [prefill.get(name, 0.0) for name in ("local_hits", "received", "computed")]
    total = sum(counted)
    return {name: 100 * value / total for name, value in zip(SOURCES, counted, strict=True)} if total else {}


def theoretical_hit(result: BenchResult) -> float:
    """Return the per cent of the prompt tokens that a cache without limits would have that was empty before. Each
    measurement has a `cache_salt` of its own: a trace has what it repeats itself, and random prompts repeat nothing."""
    return 0.0 if result.trace is None else 100 * result.trace.prefix_hit


def stages(each: Measurement) -> Mapping[str, float]:
    """Mean seconds a completed request. A stage that is not counted is missing."""
    window, done = each.window, each.figures.completed
    if not done:
        return {}
    # One engine that does both counts its decoding with its prefill. Where decode has engines of its own that could not
    # be read, the count of prefill is none of decoding.
    decode = window.prefill if _aggregated(each) else window.decode
    queues = [counts.get("queue_seconds") for counts in (window.proxy, window.prefill)]
    counted = {
        "queue": sum(filter(None, queues)) if any(queue is not None for queue in queues) else None,
        "prefill": window.prefill.get("prefill_seconds"),
        "transfer": window.proxy.get("transfer_seconds"),
        "decode": decode.get("decode_seconds"),
    }
    return {name: seconds / done for name, seconds in counted.items() if seconds is not None}


def _aggregated(each: Measurement) -> bool:
    """Return whether the mode was aggregated, by the names of the engines, which begin with their role."""
    return any(name.startswith("aggregated-") for name in each.before.engines)


@dataclass(frozen=True)
class ReportRow:
    """A measurement, or a point that has none."""

    series: str
    """What is varied: the deployment, and the prompts where they differ."""
    workload: Workload
    load: Load
    repeat: int | None
    valid: bool
    reasons: tuple[Reason, ...]
    unchecked: tuple[Reason, ...]
    measurement: Measurement | None
    """None: nothing was measured."""
    theory: float | None = None
    """Per cent of its prompt tokens that a cache without limits would have."""

    @property
    def answered(self) -> bool:
        """Return whether the row has figures at all."""
        return self.measurement is not None and self.measurement.figures.completed > 0

    @property
    def status(self) -> str:
        return "VALID" if self.valid else "INVALID"


@dataclass(frozen=True)
class ReportContents:
    """Holds all that a page shows."""

    provenance: tuple[tuple[str, Provenance], ...]
    """The provenance of each result, with what is varied."""
    rows: tuple[ReportRow, ...]
    timelines: tuple[Timeline, ...] = ()
    """The timelines of each start of a deployment whose history was kept."""

    @property
    def invalid(self) -> int:
        return sum(not row.valid for row in self.rows)

    @property
    def names(self) -> Mapping[str, str]:
        """Return what each series is called in tables and pictures: with a letter, where there are several."""
        series = list(dict.fromkeys(row.series for row in self.rows))
        return {each: f"{letter(index)}: {each}" if len(series) > 1 else each for index, each in enumerate(series)}

    def letter(self, series: str) -> str:
        """Return what a series is called where there is little room; the name itself where it is the only one."""
        name = self.names.get(series, series)
        return name.removesuffix(f": {series}") if len(self.names) > 1 else name


def read_report(folders: Sequence[Path]) -> ReportContents:
    """Read the results in these folders into the contents of a report. Raises StateError when a folder has neither
    benchmarks nor sweeps."""
    results: list[tuple[str, BenchResult]] = []
    rows: list[ReportRow] = []
    sources = name_apart([source for folder in folders for source in _sources(folder)])
    for source in sources:
        if source.result is not None:
            results.append((source.series, source.result))
            rows += rows_of(source.series, source.result)
        elif source.record is not None:
            rows.append(_unmeasured(source.series, source.record))
    # Curves of different prompts are different curves.
    works = {row.workload.title for row in rows}
    if len(works) > 1:
        rows = [replace(row, series=f"{row.workload.title}; {row.series}") for row in rows]
        results = [(f"{result.workload.title}; {series}", result) for series, result in results]
    rows = _sorted(rows)
    provenance = tuple((series, result.provenance) for series, result in results)
    return ReportContents(provenance, tuple(rows), tuple(_timelines(sources, rows)))


def _sources(folder: Path) -> Iterator[ReportedResult]:
    """Yield the results below a folder in the order in which they were measured: the name of a run begins with its
    time."""
    if (folder / RESULT).is_file():
        result = read_result(folder, str(folder))
        series = f"{result.provenance.deployment} {folder.name}"
        yield ReportedResult(series, folder, result, None, result.provenance.run_id, folder / EVENTS)
        return
    points = read_sweep(folder)
    keys = {key for point in points for key, _ in point.record.settings}
    varied = varied_keys([point.record for point in points]) or keys
    for point in sorted(points, key=lambda point: point.record.run_id or "~"):
        record = point.record
        series = ", ".join(f"{key}={value}" for key, value in record.settings if key in varied) or folder.name
        kept = SweepFolder(folder).events(record.run_id or "")
        yield ReportedResult(series, folder, point.result, record, record.run_id, kept)


def rows_of(series: str, result: BenchResult) -> list[ReportRow]:
    """Return the rows of a result."""
    return [
        ReportRow(
            series,
            result.workload,
            each.load,
            each.repeat,
            each.verdict.valid,
            each.verdict.reasons,
            each.verdict.unchecked,
            each,
            theoretical_hit(result),
        )
        for each in result.measurements
    ]


def _timelines(sources: Sequence[ReportedResult], rows: Sequence[ReportRow]) -> Iterator[Timeline]:
    """Yield the timelines in the order of their starts. A run is drawn once, with all that was measured on it."""
    spans: dict[str, list[MeasuredSpan]] = {}
    for row in rows:
        if row.measurement is not None:
            before, after = row.measurement.before, row.measurement.after
            spans.setdefault(before.run_id, []).append(
                MeasuredSpan(before.clocks.wall, after.clocks.wall, row.load.title, row.valid)
            )
    for run_id in sorted({source.run_id for source in sources if source.run_id is not None}):
        its = [source for source in sources if source.run_id == run_id]
        events, _ = history.read(its[-1].events, 0)
        of = "; ".join(dict.fromkeys(source.series for source in its))
        if (drawn := timeline(run_id, of, events, spans.get(run_id, []))) is not None:
            yield drawn


def _unmeasured(series: str, record: PointRecord) -> ReportRow:
    return ReportRow(series, record.workload, record.load, None, False, record.reasons, record.unchecked, None)


def _sorted(rows: Sequence[ReportRow]) -> list[ReportRow]:
    series = list(dict.fromkeys(row.series for row in rows))
    return sorted(
        rows,
        key=lambda row: (series.index(row.series), row.load.rate or 0, row.load.concurrency or 0, row.repeat or 0),
    )
