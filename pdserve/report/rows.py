"""What a report shows, of folders of sweeps and of results: a row for each measurement, with its verdict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pdserve.bench.result import BenchResult, Measurement, Provenance
from pdserve.bench.stored import RESULT, read_result
from pdserve.bench.validity import Reason
from pdserve.bench.workload import Load, Workload
from pdserve.errors import StateError
from pdserve.sweep.record import PointRecord, has_result, records_in


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

    @property
    def status(self) -> str:
        return "VALID" if self.valid else "INVALID"


@dataclass(frozen=True)
class ReportContents:
    """All that a page shows."""

    provenance: tuple[tuple[str, Provenance], ...]
    """Of each result, with the folder's name."""
    rows: tuple[ReportRow, ...]

    @property
    def invalid(self) -> int:
        return sum(not row.valid for row in self.rows)


def read_report(folders: Sequence[Path]) -> ReportContents:
    """Raises StateError when a folder has neither."""
    provenance: list[tuple[str, Provenance]] = []
    rows: list[ReportRow] = []
    for folder in folders:
        if has_result(folder):
            result = read_result(folder, str(folder))
            provenance.append((folder.name, result.provenance))
            rows += rows_of(f"{result.provenance.deployment} {folder.name}", result, None)
            continue
        records = records_in(folder)
        if not records:
            raise StateError(
                "there is neither a sweep nor a benchmark here",
                where=str(folder),
                cause=f"it has no {RESULT} and no points that are over",
                todo="give the folder that `pdserve sweep` or `pdserve bench` has printed",
            )
        for place, record in records.items():
            series = ", ".join(f"{key}={value}" for key, value in record.settings) or folder.name
            if record.result is None:
                rows.append(_unmeasured(series, record))
                continue
            there = place / record.result
            result = read_result(there, str(there))
            provenance.append((record.id, result.provenance))
            rows += rows_of(series, result, record)
    return ReportContents(tuple(provenance), tuple(_sorted(_with_work(rows))))


def rows_of(series: str, result: BenchResult, record: PointRecord | None) -> list[ReportRow]:
    """A measurement counts only if its point does too. What the sweep itself objects to is shown at each."""
    rows = []
    for each in result.measurements:
        reasons, unchecked = each.verdict.reasons, each.verdict.unchecked
        if record is not None and record.status == "INVALID":
            reasons = tuple(dict.fromkeys((*reasons, *record.reasons)))
        if record is not None:
            unchecked = tuple(dict.fromkeys((*unchecked, *record.unchecked)))
        valid = each.verdict.valid and (record is None or record.status == "VALID")
        rows.append(ReportRow(series, result.workload, each.load, each.repeat, valid, reasons, unchecked, each))
    return rows


def varied(provenance: Sequence[tuple[str, Provenance]]) -> tuple[Mapping[str, str], Mapping[str, list[str]]]:
    """Versions and hardware: what all results share, and what differs, with every value of it."""
    values: dict[str, list[str]] = {}
    for _, about in provenance:
        facts = {f"version of {name}": value or "-" for name, value in about.versions.items()}
        facts |= dict(about.hardware)
        for name, value in facts.items():
            values.setdefault(name, []).append(value)
    shared = {n: v[0] for n, v in values.items() if len(set(v)) == 1 and len(v) == len(provenance)}
    return shared, {name: list(dict.fromkeys(v)) for name, v in values.items() if name not in shared}


def _unmeasured(series: str, record: PointRecord) -> ReportRow:
    return ReportRow(series, record.workload, record.load, None, False, record.reasons, record.unchecked, None)


def _with_work(rows: Sequence[ReportRow]) -> list[ReportRow]:
    """Curves of different prompts are different curves."""
    works = {row.workload.title for row in rows}
    if len(works) < 2:
        return list(rows)
    return [ReportRow(**{**vars(row), "series": f"{row.series}; {row.workload.title}"}) for row in rows]


def _sorted(rows: Sequence[ReportRow]) -> list[ReportRow]:
    series = list(dict.fromkeys(row.series for row in rows))
    return sorted(
        rows,
        key=lambda row: (series.index(row.series), row.load.rate or 0, row.load.concurrency or 0, row.repeat or 0),
    )
