"""A sweep as job arrays of Slurm, submitted and followed from a login node: a task for each deployment that has points
to run."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pdserve.errors import StateError
from pdserve.logs.lines import end_of, split
from pdserve.operations.plan_recipe import errors_with_lines, plan_for
from pdserve.plan.sbatch import ArrayMember, RenderedArray, job_shape, render_arrays
from pdserve.reach.slurm import SlurmTask, cancel, look_at_array, stop_array, submit
from pdserve.sweep.file import PlannedSweep, Point, Variant, by_deployment, errors_with_sweep_lines
from pdserve.sweep.record import ArrayRecord, PointRecord, SweepFolder, TaskRecord, arrays_of, task_of, write_array
from pdserve.system.stop_signals import hold_stops

_POLL_SECONDS = 5.0
_AWAY_SECONDS = 1800.0
_SHOWN_BYTES = 16384
"""Length of the end of a task's log, in which its error is looked for."""
_LATE_SECONDS = 10.0
"""A network file system may show the last record after Slurm reports the end."""

Show = Callable[[str], None]
"""Gets one line."""
OnPoint = Callable[[Point, PointRecord], None]


def scripts(
    planned: PlannedSweep, some: Sequence[Point], words: Sequence[str], *, at_once: int | None
) -> tuple[RenderedArray, ...]:
    """Render one array for each set of nodes and options; nothing is submitted. `words`: the sweep file and the options
    that each task is given. Raises RecipeError for a recipe that is no job, with the lines of the sweep file."""
    members = []
    for deployment, _ in by_deployment(some):
        loaded = planned.recipes[deployment.digest]
        with errors_with_sweep_lines(deployment.settings, planned.loaded), errors_with_lines(loaded):
            job_shape(loaded.recipe)  # refused here, where it is known which of the recipes is wrong
            plan = plan_for(loaded, None, run_dir=f"run-{loaded.path.stem}", run_id="rendered").plan
        members.append(ArrayMember(deployment.digest, deployment.title, loaded.recipe, plan))
    return render_arrays(members, words, name=planned.loaded.sweep.name, at_once=at_once)


def check_none_runs(folder: SweepFolder) -> None:
    """Check that no array of this sweep waits or runs: what it will measure would be measured twice. Raises
    StateError."""
    for array in arrays_of(folder):
        tasks = look_at_array(array.job)
        if tasks is None:
            raise StateError(
                "Slurm's controller does not answer, and it has to say whether an array of this sweep still runs",
                where=f"job {array.job}",
                todo="scontrol ping; then the same command again",
            )
        if living := [task for task in tasks.values() if not task.over]:
            raise StateError(
                f"job {array.job} of this sweep is not over: {len(living)} of its tasks wait or run",
                where=str(folder.path),
                todo=f"wait for it (squeue --job {array.job}), or end it (scancel {array.job}), and submit again: what "
                "is measured then is not measured again",
            )


def submit_arrays(
    arrays: Sequence[RenderedArray], folder: SweepFolder, show: Show, *, one_after_other: bool
) -> tuple[ArrayRecord, ...]:
    """Submit the arrays of a sweep. `one_after_other`: a limit of tasks at a time is that of all arrays together.
    Raises PreflightError with sbatch's own words, and StateError where the record cannot be written. That and a Ctrl-C
    cancel all that are submitted by then."""
    records: list[ArrayRecord] = []
    jobs: list[str] = []
    try:
        for array in arrays:
            with hold_stops():
                after = [f"--dependency=afterany:{jobs[-1]}"] if jobs and one_after_other else []
                jobs.append(submit(array.script, after))
                ids = tuple(member.id for member in array.members)
                records.append(ArrayRecord(job=jobs[-1], deployments=ids, submitted=time.time()))
                write_array(folder, records[-1])
                nodes = f"{array.nodes} node{'s' if array.nodes > 1 else ''}"
                tasks = "1 task" if len(ids) == 1 else f"{len(ids)} tasks"
                show(f"submitted job {jobs[-1]}: {tasks} of {nodes}; scancel {jobs[-1]}")
    except (KeyboardInterrupt, StateError):
        with hold_stops():
            for job in jobs:
                cancel(job)
                show(f"cancelled job {job}")
        raise
    return tuple(records)


@dataclass
class ArrayFollower:
    """Shows what becomes of the tasks and points of arrays."""

    planned: PlannedSweep
    folder: SweepFolder
    arrays: Sequence[ArrayRecord]
    show: Show
    on_point: OnPoint
    known: dict[str, PointRecord]
    """Records of points, by their ids, that were shown or that are older."""
    poll_seconds: float = _POLL_SECONDS
    states: dict[str, SlurmTask] = field(default_factory=dict)
    """The last known state of each task, by the id that Slurm gives it (`17_3`)."""

    def until_over(self) -> None:
        """Wait until the arrays are over. Ctrl-C stops the arrays in order, a second one at once; both raise
        KeyboardInterrupt. Raises StateError when the controller does not answer for half an hour."""
        try:
            self._wait()
        except KeyboardInterrupt:
            self.show("stopping the tasks in order; Ctrl-C once more cancels them at once")
            try:
                for array in self.arrays:
                    stop_array(array.job)
                self._wait()
            except KeyboardInterrupt:
                with hold_stops():
                    for array in self.arrays:
                        cancel(array.job)
            raise
        deadline = time.monotonic() + _LATE_SECONDS
        while any(p.id not in self.known for p in self.planned.points) and time.monotonic() < deadline:
            time.sleep(min(1.0, self.poll_seconds))
            self._points()

    def _wait(self) -> None:
        answered = time.monotonic()
        while True:
            looked = [self._look(array) for array in self.arrays]
            self._points()
            if None not in looked:
                answered = time.monotonic()
            if all(over is True for over in looked):
                return
            if time.monotonic() - answered > _AWAY_SECONDS:
                raise StateError(
                    f"Slurm's controller has not answered for {_AWAY_SECONDS:.0f} s; the arrays may go on",
                    where=", ".join(array.job for array in self.arrays),
                    todo="scontrol ping; then squeue, and `pdserve sweep FILE --dry-run` for what was measured",
                )
            time.sleep(self.poll_seconds)

    def _look(self, array: ArrayRecord) -> bool | None:
        """Return whether all tasks of an array are over; None: the controller does not answer."""
        tasks = look_at_array(array.job)
        if tasks is None:
            return None
        for number, task in tasks.items():
            name = f"{array.job}_{number}"
            if (before := self.states.get(name)) is None or str(before) != str(task):
                self.show(f"task {name}: {task}")
            self.states[name] = task
        return all(number not in tasks or tasks[number].over for number in range(len(array.deployments)))

    def _points(self) -> None:
        for point in self.planned.points:
            record = self.folder.read(point)
            if record is not None and record != self.known.get(point.id):
                self.known[point.id] = record
                self.on_point(point, record)


def list_unfinished(
    planned: PlannedSweep, folder: SweepFolder, names: Mapping[Variant, str], states: Mapping[str, SlurmTask]
) -> list[str]:
    """Return a line for each deployment that a task has left without all of its points: the job, its log, and why.
    `names`: what each is called; `states`: what Slurm said of tasks, by the id that Slurm gives each (`17_3`)."""
    lines = []
    arrays = arrays_of(folder)
    for deployment, points in by_deployment(planned.points):
        missing = sum(folder.read(point) is None for point in points)
        array = next((each for each in reversed(arrays) if deployment.digest in each.deployments), None)
        job = None if array is None else f"{array.job}_{array.deployments.index(deployment.digest)}"
        record = task_of(folder, deployment.digest)
        if array is not None and record is not None and record.job != job:
            if record.began > array.submitted:
                job = None  # it was run once more after the array: here, or by a script that was submitted by hand
            else:
                record = None  # it has nothing to say of a task that did not come as far as to write its own
        if missing and (record is not None or job is not None):
            task = states.get(job) if job is not None else None
            what = f"{names[deployment]}: {missing} of {len(points)} points were not measured"
            lines.append(f"{what}: {_end_of(job, task, record)}")
    return lines


def _end_of(job: str | None, task: SlurmTask | None, record: TaskRecord | None) -> str:
    parts = [record.where if record is not None else f"job {job}"]
    if record is None and task is not None and task.output is not None:
        parts.append(f"log {task.output}")
    if task is not None:
        parts.append(str(task))
    if record is not None and record.error is not None:
        parts.append(record.error)
    elif record is not None and record.ended is None:
        parts.append("it has written no end: it runs, or it was killed (time limit, memory, its node)")
    elif record is None:
        output = task.output if task is not None else None
        parts.append(_last_error(output) or "it has written nothing: it waits, or it ended before pdserve began")
    return "; ".join(parts)


def _last_error(output: Path | None) -> str | None:
    """Return the last error that a task has printed which failed before it could write a record."""
    if output is None or not output.is_file():
        return None
    lines = [line for line in split(end_of(output, _SHOWN_BYTES)) if line.startswith("error: ")]
    return lines[-1].removeprefix("error: ") if lines else None
