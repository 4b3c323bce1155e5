"""The record of a sweep: its folder, its points, and who runs which of its deployments.

<home>/<deployment>/sweep/<name>/        beside the runs of its deployment
    points/<point>/point.json            what it is, its verdict, where its result is
    points/<point>/<attempt>/            a result of `pdserve bench`: result.json, raw output and log of the client
    starts/<run id>/                     of each start of a deployment: recipe, plan, versions, history, logs
    tasks/<deployment's id>.json         the last task that ran this deployment: job, log, how it ended
    arrays/<job>.json                    what was submitted to Slurm as an array: a deployment for each number
<home>/<deployment>/sweep.lock           held by the sweep that starts and stops deployments of this name

A point has no point.json until it is over: one that was cut off is measured again. Each task writes a file of its own,
so that tasks beside each other never write the same one; the record of a task that was killed has no end.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

from pdserve.atomic_write import replace_text
from pdserve.bench.result import BenchResult
from pdserve.bench.validity import Reason
from pdserve.bench.workload import Load, Workload
from pdserve.errors import MAKE_ROOM, PdserveError, StateError
from pdserve.logs.rotation import rotated_log
from pdserve.plan.frozen import SCHEMA, Frozen, SchemaVersion
from pdserve.run.directory import RunDir
from pdserve.run.stored_model import ModelT, read_model
from pdserve.sweep.file import Point, Settings

POINT = "point.json"
POINTS = "points"
_FOLDER, _STARTS = "sweep", "starts"


class PointRecord(Frozen):
    """Is a point.json: the record of a point that is over."""

    schema_version: SchemaVersion = SCHEMA
    id: str
    settings: Settings
    workload: Workload
    load: Load
    status: Literal["VALID", "INVALID"]
    reasons: tuple[Reason, ...] = ()
    """Why it is INVALID: the reasons of its measurements, or why it was not measured."""
    unchecked: tuple[Reason, ...] = ()
    caches: Mapping[str, str] = {}
    """The way in which each cache was emptied before the measurement, by its engine or server, or why it was not."""
    result: str | None = None
    """The folder of its result, beside this file; None: it was not measured."""
    run_id: str | None = None
    """The start of the deployment that it was measured on; None: there was none."""
    start_seconds: float | None = None
    """What the deployment needed to start; only of the first point after a start."""
    seconds: float
    """What the measurement needed, warm-ups and readings included."""


class SweepFolder:
    """Knows the folder of a sweep of a deployment."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.starts = path / _STARTS

    @classmethod
    def of(cls, root: Path, deployment: str, name: str) -> SweepFolder:
        return cls(root / deployment / _FOLDER / name)

    def events(self, run_id: str) -> Path:
        """Return the history of a start, if it was kept."""
        return RunDir(self.starts / run_id).events

    def point(self, point: Point) -> Path:
        return self.path / POINTS / point.id

    def read(self, point: Point) -> PointRecord | None:
        """Read the record of a point; None: it was never measured to its end. Raises StateError for a record that
        cannot be read."""
        file = self.point(point) / POINT
        return read_point(file) if file.exists() else None

    def write(self, point: Point, record: PointRecord) -> None:
        """Write the record of a point in one step, so that a crash leaves no half of it. Raises StateError."""
        file = self.point(point) / POINT
        _write(file, record)


def read_point(file: Path) -> PointRecord:
    """Read the record of a point. Raises StateError for one of another version, or that is damaged."""
    return _read(PointRecord, file, todo=f"remove {file.parent} to measure the point again")


def records_in(folder: Path) -> Mapping[Path, PointRecord]:
    """Return all points of a sweep's folder that are over, by the folder of each. Raises StateError."""
    return {file.parent: read_point(file) for file in sorted(folder.glob(f"{POINTS}/*/{POINT}"))}


_TASKS, _ARRAYS = "tasks", "arrays"
_NAME_LOCK = "sweep.lock"


class TaskRecord(Frozen):
    """Records a process that runs the points of one deployment."""

    schema_version: SchemaVersion = SCHEMA
    deployment: str
    """Its id: the digest of its recipe."""
    host: str
    pid: int
    job: str | None = None
    """`123_4` of a Slurm array, `123` of a job; None: it runs in none."""
    log: str | None = None
    """The file that its output goes to."""
    began: float
    """Wall-clock seconds."""
    ended: float | None = None
    """None: it runs, or it was killed."""
    error: str | None = None
    """Why it ended before all of its points were measured."""

    @property
    def where(self) -> str:
        """Name the job and its log, or the process, for a reader."""
        named = f"job {self.job} on {self.host}" if self.job is not None else f"PID {self.pid} on {self.host}"
        return f"{named}, log {self.log}" if self.log is not None else named


class ArrayRecord(Frozen):
    """Records an array that was submitted."""

    schema_version: SchemaVersion = SCHEMA
    job: str
    deployments: tuple[str, ...]
    """Ids; the place of each is the number of its task."""
    submitted: float
    """Wall-clock seconds."""


def job_of(environ: Mapping[str, str]) -> str | None:
    """Return the job as Slurm's tools call it."""
    array, number = environ.get("SLURM_ARRAY_JOB_ID"), environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{number}" if array and number else environ.get("SLURM_JOB_ID") or None


def log_here() -> str | None:
    """Return the file that this process prints to."""
    with suppress(OSError):
        file = Path("/proc/self/fd/1").readlink()
        if file.is_file():
            return str(file)
    return None


def _own_record(deployment: str, environ: Mapping[str, str]) -> TaskRecord:
    return TaskRecord(
        deployment=deployment,
        host=socket.gethostname(),
        pid=os.getpid(),
        job=job_of(environ),
        log=log_here(),
        began=time.time(),
    )


@contextmanager
def record_task(folder: SweepFolder, deployment: str, environ: Mapping[str, str]) -> Iterator[None]:
    """Keep the record of this process, with the error that ends the block. Raises StateError when it cannot be
    written."""
    record = _own_record(deployment, environ)
    file = folder.path / _TASKS / f"{deployment}.json"
    _write(file, record)
    error: str | None = "it ended by an error that its log has"
    try:
        yield
        error = None
    except (PdserveError, KeyboardInterrupt) as raised:
        error = _why(raised)
        raise
    finally:
        with suppress(StateError):  # the points are written, and an error of the block is the one to show
            _write(file, record.model_copy(update={"ended": time.time(), "error": error}))


@contextmanager
def hold_name(root: Path, name: str, environ: Mapping[str, str]) -> Iterator[None]:
    """Hold the lock of a deployment's name, of which the kernel lets go when this process dies: what runs under the
    name is of no other sweep that lives. Raises StateError when another sweep has it."""
    file = root / name / _NAME_LOCK
    descriptor: int | None = None
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(descriptor, 0)
        os.write(descriptor, _own_record(name, environ).where.encode())
        yield
    except BlockingIOError:
        raise StateError(
            f"{name} is measured by another sweep now",
            where=str(file),
            cause=file.read_text(encoding="utf-8", errors="replace") or "it holds the lock",
            todo="wait until it has ended, or give the deployment another name in the recipe",
        ) from None
    finally:
        if descriptor is not None:
            os.close(descriptor)


def task_of(folder: SweepFolder, deployment: str) -> TaskRecord | None:
    """Return the record of the last task that ran this deployment. Raises StateError for a record that cannot be
    read."""
    file = folder.path / _TASKS / f"{deployment}.json"
    return _read(TaskRecord, file) if file.exists() else None


def write_array(folder: SweepFolder, record: ArrayRecord) -> None:
    """Write the record of an array of jobs. Raises StateError when it cannot be written."""
    _write(folder.path / _ARRAYS / f"{record.job}.json", record)


def arrays_of(folder: SweepFolder) -> list[ArrayRecord]:
    """Return all arrays that were submitted, the oldest first. Raises StateError."""
    files = sorted((folder.path / _ARRAYS).glob("*.json"))
    records = [_read(ArrayRecord, file) for file in files]
    return sorted(records, key=lambda record: record.submitted)


def _read(model: type[ModelT], file: Path, todo: str = "remove it") -> ModelT:
    return read_model(model, file.read_bytes(), file, other_version=todo, damaged=todo)


def _write(file: Path, record: Frozen) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        replace_text(file, record.model_dump_json(indent=1))
    except OSError as error:
        raise StateError(
            "the record of a sweep cannot be written",
            where=str(file),
            cause=error.strerror or str(error),
            todo=MAKE_ROOM,
        ) from error


def _why(error: PdserveError | KeyboardInterrupt) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "it was stopped: by Ctrl-C, scancel, or the job's time limit"
    return str(error) or type(error).__name__


def record_failure(point: Point, check: str, why: str, *, run_id: str | None, seconds: float = 0.0) -> PointRecord:
    """Make the record of a point without a result."""
    return PointRecord(
        id=point.id,
        settings=point.deployment.settings,
        workload=point.workload,
        load=point.load,
        status="INVALID",
        reasons=(Reason(check=check, text=why),),
        run_id=run_id,
        seconds=seconds,
    )


def record_of(
    point: Point,
    result: BenchResult,
    *,
    caches: Mapping[str, str],
    attempt: str,
    start_seconds: float | None,
    seconds: float,
) -> PointRecord:
    """Make the record of a point that was measured: it counts where each of its measurements does. `caches`: what
    became of them before; `attempt`: the folder of the result."""
    verdicts = [measurement.verdict for measurement in result.measurements]
    return PointRecord(
        id=point.id,
        settings=point.deployment.settings,
        workload=point.workload,
        load=point.load,
        status="VALID" if result.valid else "INVALID",
        reasons=tuple(dict.fromkeys(reason for verdict in verdicts for reason in verdict.reasons)),
        unchecked=tuple(dict.fromkeys(reason for verdict in verdicts for reason in verdict.unchecked)),
        caches=caches,
        result=attempt,
        run_id=result.provenance.run_id,
        start_seconds=start_seconds,
        seconds=seconds,
    )


def keep_start(run: RunDir, starts: Path) -> None:
    """Keep recipe, plan, versions, history, failure and logs of a start; no key is among them. Raises StateError."""
    there = starts / run.run_id
    files = (run.recipe, run.plan, run.versions, run.state, run.events, rotated_log(run.events), run.failure)
    try:
        there.mkdir(parents=True, exist_ok=True, mode=0o700)
        for file in files:
            if file.exists():
                shutil.copy2(file, there / file.name)
        if run.logs.exists():
            shutil.copytree(run.logs, there / run.logs.name, dirs_exist_ok=True)
    except OSError as error:
        raise StateError(
            "the logs of a start cannot be kept",
            where=str(there),
            cause=error.strerror or str(error),
            todo=MAKE_ROOM,
        ) from error
