"""What a sweep leaves, beside the runs of its deployment.

<home>/<deployment>/sweep/<name>/
    points/<point>/point.json            what it is, its verdict, where its result is
    points/<point>/<attempt>/            a result of `pdserve bench`: result.json, raw output and log of the client
    starts/<run id>/                     of each start of a deployment: recipe, plan, versions, history, logs
    tasks/, arrays/                      who runs which deployment (pdserve.sweep.tasks)

A point has no point.json until it is over: one that was cut off is measured again.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pdserve.atomic_write import replace_text
from pdserve.bench.result import BenchResult
from pdserve.bench.stored import RESULT
from pdserve.bench.validity import Reason
from pdserve.bench.workload import Load, Workload
from pdserve.errors import MAKE_ROOM, StateError
from pdserve.plan.frozen import SCHEMA, Frozen, SchemaVersion
from pdserve.run.directory import RunDir
from pdserve.run.stored_model import read_model
from pdserve.sweep.points import Point, Settings

POINT = "point.json"
POINTS = "points"
_FOLDER, _STARTS = "sweep", "starts"


class PointRecord(Frozen):
    """point.json: of a point that is over."""

    schema_version: SchemaVersion = SCHEMA
    id: str
    settings: Settings
    workload: Workload
    load: Load
    status: Literal["VALID", "INVALID"]
    reasons: tuple[Reason, ...] = ()
    """Why it is INVALID: those of its measurements, and those of the sweep itself."""
    unchecked: tuple[Reason, ...] = ()
    caches: Mapping[str, str] = {}
    """Of each engine and LMCache server: how its cache was emptied before the measurement, or why it was not."""
    result: str | None = None
    """The folder of its result, beside this file; None: it was not measured."""
    run_id: str | None = None
    """The start of the deployment that it was measured on; None: there was none."""
    start_seconds: float | None = None
    """That the deployment needed to start; only of the first point after a start."""
    seconds: float
    """That the measurement needed, warm-ups and readings included."""


class SweepFolder:
    """Of a sweep of a deployment."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.starts = path / _STARTS

    @classmethod
    def of(cls, root: Path, deployment: str, name: str) -> SweepFolder:
        return cls(root / deployment / _FOLDER / name)

    def events(self, run_id: str) -> Path:
        """The history of a start, if it was kept."""
        return RunDir(self.starts / run_id).events

    def point(self, point: Point) -> Path:
        return self.path / POINTS / point.id

    def read(self, point: Point) -> PointRecord | None:
        """None: it was never measured to its end. Raises StateError for a record that cannot be read."""
        file = self.point(point) / POINT
        return read_point(file) if file.exists() else None

    def write(self, point: Point, record: PointRecord) -> None:
        """In one step, so that a crash leaves no half of it. Raises StateError."""
        file = self.point(point) / POINT
        try:
            file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            replace_text(file, record.model_dump_json(indent=1))
        except OSError as error:
            raise StateError(
                "the record of a point cannot be written",
                where=str(file),
                cause=error.strerror or str(error),
                todo=MAKE_ROOM,
            ) from error


def read_point(file: Path) -> PointRecord:
    """Raises StateError."""
    try:
        data = file.read_bytes()
    except OSError as error:
        raise StateError("this point cannot be read", where=str(file), cause=error.strerror or str(error)) from None
    todo = f"remove {file.parent} to measure the point again"
    return read_model(PointRecord, data, file, other_version=todo, damaged=todo)


def records_in(folder: Path) -> Mapping[Path, PointRecord]:
    """All points of a sweep's folder that are over, by the folder of each. Raises StateError."""
    return {file.parent: read_point(file) for file in sorted(folder.glob(f"{POINTS}/*/{POINT}"))}


def has_result(folder: Path) -> bool:
    """Whether this is the folder of a result of `pdserve bench`."""
    return (folder / RESULT).is_file()


def reasons_of(result: BenchResult) -> tuple[tuple[Reason, ...], tuple[Reason, ...]]:
    """Of all repeats: why it is INVALID, and what could not be checked; each once."""
    verdicts = [measurement.verdict for measurement in result.measurements]
    wrong = dict.fromkeys(reason for verdict in verdicts for reason in verdict.reasons)
    unchecked = dict.fromkeys(reason for verdict in verdicts for reason in verdict.unchecked)
    return tuple(wrong), tuple(unchecked)
