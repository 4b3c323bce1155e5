"""What a report shows, of folders of sweeps and of results: a row for each measurement, with its verdict."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pdserve.bench.result import BenchResult, Measurement, Provenance
from pdserve.bench.stored import EVENTS, RESULT, read_result
from pdserve.bench.validity import Reason
from pdserve.bench.workload import Load, Workload
from pdserve.errors import StateError
from pdserve.report.attempts import own, point_of
from pdserve.report.sources import ReportedResult, distinct
from pdserve.report.stages import theoretical_hit
from pdserve.report.timeline import MeasuredSpan, Timeline, timeline
from pdserve.run import history
from pdserve.sweep.described import letter
from pdserve.sweep.record import PointRecord, SweepFolder, has_result, records_in


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
        """Whether it has figures at all."""
        return self.measurement is not None and self.measurement.figures.completed > 0

    @property
    def status(self) -> str:
        return "VALID" if self.valid else "INVALID"


@dataclass(frozen=True)
class ReportContents:
    """All that a page shows."""

    provenance: tuple[tuple[str, Provenance], ...]
    """Of each result, with what is varied."""
    rows: tuple[ReportRow, ...]
    timelines: tuple[Timeline, ...] = ()
    """Of each start of a deployment whose history was kept."""

    @property
    def invalid(self) -> int:
        return sum(not row.valid for row in self.rows)

    @property
    def names(self) -> Mapping[str, str]:
        """What each series is called in tables and pictures: with a letter, where there are several."""
        series = list(dict.fromkeys(row.series for row in self.rows))
        return {each: f"{letter(index)}: {each}" if len(series) > 1 else each for index, each in enumerate(series)}

    def letter(self, series: str) -> str:
        """What it is called where there is little room; the name itself where it is the only one."""
        name = self.names.get(series, series)
        return name.removesuffix(f": {series}") if len(self.names) > 1 else name


def read_report(folders: Sequence[Path]) -> ReportContents:
    """Raises StateError when a folder has neither."""
    results: list[tuple[str, BenchResult]] = []
    rows: list[ReportRow] = []
    runs: list[KeptRun] = []
    for source in distinct([source for folder in folders for source in _sources(folder)]):
        if source.run_id is not None and source.events is not None:
            runs.append(KeptRun(source.run_id, source.events, source.series))
        if source.result is not None:
            results.append((source.series, source.result))
            rows += rows_of(source.series, source.result, source.record)
        elif source.record is not None:
            rows.append(_unmeasured(source.series, source.record))
    # Curves of different prompts are different curves.
    works = {row.workload.title for row in rows}
    if len(works) > 1:
        rows = [replace(row, series=f"{row.workload.title}; {row.series}") for row in rows]
        results = [(f"{result.workload.title}; {series}", result) for series, result in results]
    rows = _sorted(rows)
    provenance = tuple((series, result.provenance) for series, result in results)
    return ReportContents(provenance, tuple(rows), tuple(_timelines(runs, rows)))


def _sources(folder: Path) -> Iterator[ReportedResult]:
    """In the order in which they were measured: the name of a run begins with its time."""
    if has_result(folder):
        result = read_result(folder, str(folder))
        series = f"{result.provenance.deployment} {folder.name}"
        loads = tuple(each.load for each in result.measurements)
        run_id, events = result.provenance.run_id, folder / EVENTS
        yield ReportedResult(series, folder, "", result.workload, loads, result, point_of(folder), run_id, events)
        return
    _check_folder(folder)
    records = records_in(folder)
    if not records:
        raise StateError(
            "there is neither a sweep nor a benchmark here",
            where=str(folder),
            cause=f"it has no {RESULT} and no points that are over",
            todo="give the folder that `pdserve sweep` or `pdserve bench` has printed",
        )
    varied = _varied(records.values())
    for place, record in sorted(records.items(), key=lambda item: item[1].run_id or "~"):
        series = ", ".join(f"{key}={value}" for key, value in record.settings if key in varied) or folder.name
        measured = None if record.result is None else read_result(place / record.result, str(place / record.result))
        kept = None if record.run_id is None else SweepFolder(folder).events(record.run_id)
        work, loads = record.workload, (record.load,)
        yield ReportedResult(series, folder, record.id, work, loads, measured, record, record.run_id, kept)


def _check_folder(folder: Path) -> None:
    if folder.is_dir():
        return
    if not folder.exists():
        what, todo = "this folder does not exist", "correct the path: `pdserve sweep` and `pdserve bench` print theirs"
    else:
        what, todo = "this is a file, not a folder", f"give the folder that it is in: {folder.parent}"
    raise StateError(what, where=str(folder), todo=todo)


def _varied(records: Iterable[PointRecord]) -> set[str]:
    """The keys whose value is not the same at all points of a sweep; all of its keys, where none is."""
    values: dict[str, set[str | None]] = {}
    settings = [dict(record.settings) for record in records]
    for key in (key for each in settings for key in each):
        values[key] = {each.get(key) for each in settings}
    return {key for key, seen in values.items() if len(seen) > 1} or set(values)


def rows_of(series: str, result: BenchResult, record: PointRecord | None) -> list[ReportRow]:
    """A measurement counts only if its point does too. What the sweep itself objects to is shown at each."""
    verdicts = [each.verdict for each in result.measurements]
    wrong = own(record.reasons, [verdict.reasons for verdict in verdicts]) if record is not None else ()
    unchecked = own(record.unchecked, [verdict.unchecked for verdict in verdicts]) if record is not None else ()
    rows = []
    for each in result.measurements:
        valid = each.verdict.valid and (record is None or record.status == "VALID")
        reasons = (*each.verdict.reasons, *wrong)
        if not valid and not reasons:
            reasons = (Reason(check="point", text="another repeat of its point is INVALID"),)
        rows.append(
            ReportRow(
                series,
                result.workload,
                each.load,
                each.repeat,
                valid,
                reasons,
                (*each.verdict.unchecked, *unchecked),
                each,
                theoretical_hit(result),
            )
        )
    return rows


@dataclass(frozen=True)
class KeptRun:
    """A run whose history may have been kept."""

    run_id: str
    events: Path
    series: str


def _timelines(runs: Sequence[KeptRun], rows: Sequence[ReportRow]) -> Iterator[Timeline]:
    """In the order of their starts. A run is drawn once, with all that was measured on it."""
    spans: dict[str, list[MeasuredSpan]] = {}
    for row in rows:
        if row.measurement is not None:
            before, after = row.measurement.before, row.measurement.after
            spans.setdefault(before.run_id, []).append(
                MeasuredSpan(before.clocks.wall, after.clocks.wall, row.load.title, row.valid)
            )
    for run_id in sorted({run.run_id for run in runs}):
        its = [run for run in runs if run.run_id == run_id]
        events, _ = history.read(its[-1].events, 0)
        of = "; ".join(dict.fromkeys(run.series for run in its))
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
