"""The record of what ran parts of a sweep: each task writes a file of its own, so that tasks beside each other never
write the same one.

<home>/<deployment>/sweep/<name>/
    tasks/<deployment's id>.json         the last task that ran this deployment: job, log, how it ended
    tasks/<deployment's id>.lock         held by the process that runs it
    arrays/<job>.json                    what was submitted to Slurm as an array: a deployment for each number
<home>/<deployment>/sweep.lock           held by the sweep that starts and stops deployments of this name

A task that was killed has written no end: its record says so.
"""

from __future__ import annotations

import fcntl
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

from pdserve.atomic_write import replace_text
from pdserve.errors import MAKE_ROOM, PdserveError, StateError
from pdserve.plan.frozen import SCHEMA, Frozen, SchemaVersion
from pdserve.run.stored_model import ModelT, read_model
from pdserve.sweep.record import SweepFolder

_TASKS, _ARRAYS = "tasks", "arrays"
_NAME_LOCK = "sweep.lock"


class TaskRecord(Frozen):
    """Of a process that runs the points of one deployment."""

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
        """For a reader: the job and its log, or the process."""
        named = f"job {self.job} on {self.host}" if self.job is not None else f"PID {self.pid} on {self.host}"
        return f"{named}, log {self.log}" if self.log is not None else named


class ArrayRecord(Frozen):
    """Of an array that was submitted."""

    schema_version: SchemaVersion = SCHEMA
    job: str
    deployments: tuple[str, ...]
    """Ids; the place of each is the number of its task."""
    submitted: float
    """Wall-clock seconds."""


def job_of(environ: Mapping[str, str]) -> str | None:
    """As Slurm's tools call it."""
    array, number = environ.get("SLURM_ARRAY_JOB_ID"), environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{number}" if array and number else environ.get("SLURM_JOB_ID") or None


def log_here() -> str | None:
    """The file that this process prints to."""
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
def recorded(folder: SweepFolder, deployment: str, environ: Mapping[str, str]) -> Iterator[None]:
    """The record of this process, with the error that ends the block. Raises StateError when it cannot be written."""
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
def alone(folder: SweepFolder, deployments: tuple[str, ...]) -> Iterator[None]:
    """Holds the locks of these deployments; the kernel lets go of them when this process dies, however it dies. Raises
    StateError when another process runs one of them."""
    with ExitStack() as stack:
        for deployment in deployments:
            file = folder.path / _TASKS / f"{deployment}.lock"
            stack.enter_context(_held(file, partial(_taken, folder, deployment, file)))
        yield


@contextmanager
def only_sweep(root: Path, name: str, environ: Mapping[str, str]) -> Iterator[None]:
    """Holds the lock of a deployment's name: what runs under it is of no other sweep that lives. A sweep of an edited
    recipe has other ids and the same name. Raises StateError when another sweep has it."""
    file = root / name / _NAME_LOCK
    with _held(file, partial(_measured_by_another, name, file)) as descriptor:
        with suppress(OSError):  # it is for a reader of the error only
            os.ftruncate(descriptor, 0)
            os.write(descriptor, _own_record(name, environ).where.encode())
        yield


@contextmanager
def _held(file: Path, taken: Callable[[], StateError]) -> Iterator[int]:
    """Its descriptor. Raises `taken` when another process holds it."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise _no_lock(file, error) from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise taken() from None
        except OSError as error:
            raise _no_lock(file, error) from error
        yield descriptor
    finally:
        os.close(descriptor)


def _no_lock(file: Path, error: OSError) -> StateError:
    return StateError(
        "the lock of a deployment of this sweep cannot be taken",
        where=str(file),
        cause=error.strerror or str(error),
        todo=MAKE_ROOM,
    )


def _measured_by_another(name: str, file: Path) -> StateError:
    who = ""
    with suppress(OSError):
        who = file.read_text(encoding="utf-8", errors="replace")
    return StateError(
        f"{name} is measured by another sweep now",
        where=str(file),
        cause=who or "it holds the lock",
        todo="wait until it has ended, or give the deployment another name in the recipe",
    )


def _taken(folder: SweepFolder, deployment: str, file: Path) -> StateError:
    record = task_of(folder, deployment)
    return StateError(
        f"the deployment {deployment} of this sweep is measured by another process now",
        where=str(file),
        cause="it holds the lock" if record is None else record.where,
        todo="wait until it has ended: what it measures is not measured again",
    )


def task_of(folder: SweepFolder, deployment: str) -> TaskRecord | None:
    """The last one that ran this deployment. Raises StateError for a record that cannot be read."""
    file = folder.path / _TASKS / f"{deployment}.json"
    return _read(TaskRecord, file) if file.exists() else None


def write_array(folder: SweepFolder, record: ArrayRecord) -> None:
    """Raises StateError."""
    _write(folder.path / _ARRAYS / f"{record.job}.json", record)


def arrays_of(folder: SweepFolder) -> list[ArrayRecord]:
    """All that were submitted, the oldest first. Raises StateError."""
    files = sorted((folder.path / _ARRAYS).glob("*.json"))
    records = [_read(ArrayRecord, file) for file in files]
    return sorted(records, key=lambda record: record.submitted)


def _read(model: type[ModelT], file: Path) -> ModelT:
    return read_model(model, file.read_bytes(), file, other_version="remove it", damaged="remove it")


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
