"""Carries a sweep out here, or in the Slurm job around it: each deployment up, its points one after the other, down;
up anew in between where only that empties its caches."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, overload

from pdserve.bench.aiperf_environment import installed_interpreter
from pdserve.bench.clients import client_of
from pdserve.bench.run import ServingDeployment, Task, bench
from pdserve.bench.snapshot import plan_digest
from pdserve.errors import PdserveError, ReportedError, StateError
from pdserve.operations.current_run import find_running, last_run
from pdserve.operations.down import down
from pdserve.operations.look import choose_destination
from pdserve.operations.plan_recipe import recipe_words
from pdserve.operations.progress import ShownProgress
from pdserve.operations.serving import serving
from pdserve.operations.up import UpOptions, up
from pdserve.run.directory import RunDir, new_run_id
from pdserve.sweep.caches import CHECK as EMPTY_CACHE
from pdserve.sweep.caches import NotEmptiedError, empty_caches, require_empty
from pdserve.sweep.file import Point, Variant, by_deployment
from pdserve.sweep.record import (
    OwnDeployment,
    PointRecord,
    SweepFolder,
    foreign_point_reason,
    hold_deployments,
    hold_name,
    job_of,
    judge_point,
    keep_start,
    record_failure,
    record_of,
    record_task,
)
from pdserve.sweep.resolve import PlannedSweep, set_of
from pdserve.system.stop_signals import let_signals_interrupt, run_to_its_end

OnPoint = Callable[[Point, PointRecord], None]


@dataclass(frozen=True)
class SweepOptions:
    """Says how each point is measured."""

    python: str | None
    """An interpreter with vLLM for the client; None: that of the engines."""
    tokenizer: str | None
    limit_seconds: float
    """For each run of the client."""
    this_machine: bool = False
    """Inside a Slurm job: this machine only, not the job's nodes."""


def points_to_run(
    planned: PlannedSweep, folder: SweepFolder, stale: Collection[str], *, retry: bool
) -> tuple[Point, ...]:
    """Return the points that were never measured to their end, and the `stale` ones, by their ids; `retry`: the INVALID
    ones too."""
    records = [(point, folder.read(point)) for point in planned.points]
    return tuple(
        point
        for point, record in records
        if record is None or point.id in stale or (retry and record.status == "INVALID")
    )


def needs_vllm(point: Point) -> bool:
    """Return whether the client of a point is that of the engines' environment."""
    return point.workload.client_for(point.load) == "vllm"


@dataclass(frozen=True)
class _Start:
    """Holds a start of a deployment."""

    own: OwnDeployment | None
    """None: it failed."""
    seconds: float
    """With the stop of what ran before."""
    error: PdserveError | None = None
    failed_run: str | None = None
    """The run of a start that failed; None: it did not come so far."""


@dataclass(frozen=True)
class SweepRunner:
    """Runs a sweep, or one deployment of it."""

    planned: PlannedSweep
    root: Path
    folder: SweepFolder
    options: SweepOptions
    show: ShownProgress
    on_point: OnPoint

    def run(self, some: Sequence[Point]) -> None:
        """Measure these points. A point that fails is INVALID, and the next one follows. Raises PreflightError when a
        client is not installed. Raises StateError when

        - a deployment of that name runs that is not the sweep's own, or cannot be stopped,
        - another process measures one of these points, or has the name for its own,
        - the record cannot be written.
        """
        let_signals_interrupt()  # a TERM before the first start has nothing to stop, and its record has the reason
        if job_of(os.environ) is None:
            _check_clients(some)  # before anything is written; in a job the record of the task has the reason
        groups = by_deployment(some)
        if not groups:
            return
        with (
            hold_deployments(self.folder, tuple(deployment.digest for deployment, _ in groups)),
            hold_name(self.root, self.planned.name, os.environ),
        ):
            for deployment, its_points in groups:
                with record_task(self.folder, deployment.digest, os.environ):
                    _check_clients(its_points)
                    self._end_former()
                    self._measure_all(deployment, its_points)

    def _end_former(self) -> None:
        """Take down what a sweep that was killed has left running; none that lives has this name."""
        self._refuse_others()
        if find_running(self.root, self.planned.name) is not None:
            self.show.note(f"{self.planned.name}: left by this sweep when it was cut off; stopping it")
            self._down()

    def _refuse_others(self) -> None:
        run = find_running(self.root, self.planned.name)
        if run is not None and not self._started(run):
            raise StateError(
                f"{self.planned.name} is running already",
                where=str(run.path),
                cause="a sweep starts and stops the deployments that it measures, and this one is not of this sweep",
                todo=f"pdserve down {self.planned.name}, or another name in the recipe",
            )

    def _started(self, run: RunDir) -> bool:
        """Return whether a run is of this sweep, which keeps a record of each run from its beginning."""
        return (self.folder.starts / run.run_id).exists()

    def _measure_all(self, deployment: Variant, its_points: Sequence[Point]) -> None:
        """Bring a deployment up, measure its points and take it down. It is only started anew in between when it is not
        ready any more, or when only a start empties its caches."""
        self.show.note(f"deployment: {deployment.title}")
        starts: list[_Start] = []
        helps = self.planned.loaded.sweep.restart_to_empty_caches
        try:
            for point in its_points:
                record: PointRecord | None = None
                if starts and not self._must_start(deployment, starts):
                    record = self._measured(point, starts[-1], fresh=False, start_helps=helps)
                while record is None:  # after a start there is one
                    starts.append(self._start(deployment))
                    record = self._measured(point, starts[-1], fresh=True, start_helps=False)
                    # What is full after a start will be full after the next one.
                    helps = helps and not any(reason.check == EMPTY_CACHE for reason in record.reasons)
                self._end(point, record)
        finally:
            try:
                self._down()
            except KeyboardInterrupt:  # what was not asked to stop yet would serve on
                self._down()
                raise

    def _must_start(self, deployment: Variant, starts: Sequence[_Start]) -> bool:
        last = starts[-1]
        if last.own is None:
            # What never came up would fail again, and a start takes minutes. What did is tried once more.
            return len(starts) > 1 and starts[-2].own is not None
        if (why := self.planned.start_for_each_point(deployment)) is not None:
            self._note_new_start(why)
            return True
        return not self._ready(last.own)

    def _note_new_start(self, why: str) -> None:
        self.show.note(f"{self.planned.name}: a new start, so that the next point begins with empty caches: {why}")

    def _start(self, deployment: Variant) -> _Start:
        """Start a deployment; what runs of this sweep is stopped first."""
        began = time.monotonic()
        self._down()
        self._refuse_others()  # what another one has started meanwhile is not stopped for a point
        former = self._run_id()
        try:
            return _Start(self._up(deployment), time.monotonic() - began)
        except PdserveError as error:
            last = self._run_id()
            return _Start(None, time.monotonic() - began, error, last if last != former else None)

    def _ready(self, own: OwnDeployment) -> bool:
        """Return whether the sweep's own deployment serves as it was started."""
        try:
            why = own.unlike(serving(self.root, self.planned.name, "sweep"))
        except StateError as error:
            why = error.what
        if why is not None:
            self.show.note(f"{self.planned.name}: {why}; the next point needs a new start")
        return why is None

    def _up(self, deployment: Variant) -> OwnDeployment:
        """Start a deployment of the sweep, and keep its start on record. Raises what `up` raises."""
        recipe = self.planned.recipes[deployment.digest]
        words = recipe_words(recipe.path, set_of(deployment.settings), ())
        begun: list[tuple[RunDir, OwnDeployment]] = []

        def begin(run: RunDir) -> None:
            keep_start(run, self.folder.starts)  # a sweep that is killed from now on knows it again
            begun.append((run, OwnDeployment(run.run_id, plan_digest(run.read_plan()))))

        try:
            up(
                recipe,
                choose_destination(recipe, None, this_machine=self.options.this_machine, words=words),
                self.show,
                UpOptions(detach=True, on_begin=begin, goes_on=True),
            )
        finally:
            for run, _ in begun:
                keep_start(run, self.folder.starts)
        if not begun:
            raise StateError(
                f"{self.planned.name} was started by another pdserve up at the same moment",
                where=str(self.root / self.planned.name),
                todo=f"pdserve down {self.planned.name}, or another name in the recipe",
            )
        return begun[-1][1]

    def _down(self) -> None:
        """Stop the deployment, if it is of this sweep."""
        run = find_running(self.root, self.planned.name)
        if run is not None and self._started(run):
            try:
                down(self.planned.name, self.show.result)
            except ReportedError as error:
                self.show.note(error.render().splitlines()[0])  # it had failed; it is stopped all the same
        # One that has died while it was measured is over already, and its history and logs have why.
        last = last_run(self.root, self.planned.name)
        if last is not None and self._started(last[0]):
            keep_start(last[0], self.folder.starts)

    def _run_id(self) -> str | None:
        last = last_run(self.root, self.planned.name)
        return None if last is None else last[0].run_id

    @overload
    def _measured(self, point: Point, start: _Start, *, fresh: bool, start_helps: Literal[False]) -> PointRecord: ...

    @overload
    def _measured(self, point: Point, start: _Start, *, fresh: bool, start_helps: bool) -> PointRecord | None: ...

    def _measured(self, point: Point, start: _Start, *, fresh: bool, start_helps: bool) -> PointRecord | None:
        """Measure a point on a deployment, and return its record. `fresh`: nothing was measured since the start. None:
        a cache is left that only another start empties, and `start_helps`."""
        own = start.own
        if own is None:
            assert start.error is not None
            return record_failure(point, "start", start.error, run_id=start.failed_run)
        began = time.monotonic()
        attempt = new_run_id()  # the salt of its prompts is made of it: it is new in every attempt
        try:
            deployment = serving(self.root, self.planned.name, "sweep")
            if (why := own.unlike(deployment)) is not None:
                return record_of(point, [foreign_point_reason(why)], [], run_id=own.run_id, seconds=0.0)
            trace = self.planned.loaded.trace_of(point.workload)
            client = client_of(
                deployment.plan,
                point.workload,
                point.load,
                trace,
                os.environ,
                python=self.options.python if needs_vllm(point) else None,
                tokenizer=self.options.tokenizer,
            )
            task = Task(point.workload, (point.load,), client, self.options.limit_seconds, trace)
            caches = self._emptied(deployment, fresh=fresh, start_helps=start_helps)
            if caches is None:
                return None
            result = run_to_its_end(bench(deployment, task, self.folder.point(point) / attempt, lambda _: None))
        except SystemExit as stop:  # a TERM or HUP, which is a Ctrl-C in all of a sweep
            raise KeyboardInterrupt from stop
        except PdserveError as error:
            check = EMPTY_CACHE if isinstance(error, NotEmptiedError) else "measurement"
            return record_failure(point, check, error, run_id=self._run_id(), seconds=time.monotonic() - began)
        return judge_point(
            point,
            result,
            own,
            caches,
            attempt=attempt,
            start_seconds=start.seconds if fresh else None,
            seconds=time.monotonic() - began,
        )

    def _emptied(self, deployment: ServingDeployment, *, fresh: bool, start_helps: bool) -> Mapping[str, str] | None:
        """Empty the caches and return what became of each. None: only a start empties them. Raises NotEmptiedError."""
        try:
            caches = run_to_its_end(empty_caches(deployment, new=fresh))
            if self.planned.loaded.sweep.restart_to_empty_caches:
                require_empty(caches)
        except NotEmptiedError as error:
            if not start_helps:
                raise
            self._note_new_start(f"{error.where}: {error.what}")
            return None
        return caches

    def _end(self, point: Point, record: PointRecord) -> None:
        self.folder.write(point, record)
        self.on_point(point, record)


def _check_clients(some: Sequence[Point]) -> None:
    """Check that the clients are installed: a missing one is no reason to find all of its points INVALID. Raises
    PreflightError."""
    if not all(map(needs_vllm, some)):
        installed_interpreter(os.environ)
