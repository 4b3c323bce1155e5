"""Carries a sweep out here, or in the Slurm job around it: each deployment up, its points one after the other, down;
up anew in between where only that empties its caches."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from pdserve.bench.clients import client_of, installed_interpreter
from pdserve.bench.result import CLIENT_CODE, circumstances, differences, fixed_circumstances, machine, read_result
from pdserve.bench.run import ServingDeployment, Task, bench
from pdserve.bench.snapshot import plan_digest
from pdserve.bench.workload import Load, Workload
from pdserve.errors import PdserveError, ReportedError, StateError
from pdserve.installed.versions import PACKAGES
from pdserve.operations.current_run import find_running, last_run, serving
from pdserve.operations.down import down
from pdserve.operations.look import choose_destination
from pdserve.operations.plan_recipe import model_files, recipe_words
from pdserve.operations.progress import ShownProgress
from pdserve.operations.up import UpOptions, up
from pdserve.preflight.engine_packages import read_versions
from pdserve.preflight.facts import own_pdserve
from pdserve.recipe.load.loader import LoadedRecipe
from pdserve.run.directory import RunDir, new_run_id
from pdserve.sweep.caches import empty_caches, find_full_cache, kept_until_start, new_caches
from pdserve.sweep.file import PlannedSweep, Point, Variant, by_deployment, set_of
from pdserve.sweep.record import (
    PointRecord,
    SweepFolder,
    arrays_of,
    hold_name,
    job_of,
    keep_start,
    record_failure,
    record_of,
    record_task,
)
from pdserve.system.stop_signals import let_signals_interrupt, run_to_its_end

_Result = TypeVar("_Result")
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


def needs_vllm(point: Point) -> bool:
    """Return whether the client of a point is that of the engines' environment."""
    return point.workload.client_for(point.load) == "vllm"


@dataclass(frozen=True)
class _Start:
    """Holds a start of a deployment."""

    run_id: str | None
    """None: it did not come so far."""
    plan: str
    """Digest of its plan."""
    seconds: float
    """With the stop of what ran before."""
    error: PdserveError | None = None
    """Why it failed."""

    def unlike(self, deployment: ServingDeployment) -> str | None:
        """Return why what serves is another deployment than was started; None: it is this one."""
        if deployment.run.run_id != self.run_id:
            return f"another run serves now: {deployment.run.run_id}"
        same = plan_digest(deployment.plan) == self.plan
        return None if same else "another plan was applied (pdserve up on the running deployment)"


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
        - another sweep has the name for its own,
        - the record cannot be written.
        """
        let_signals_interrupt()  # a TERM before the first start has nothing to stop, and its record has the reason
        if job_of(os.environ) is None:
            _check_clients(some)  # before anything is written; in a job the record of the task has the reason
        groups = by_deployment(some)
        if not groups:
            return
        with hold_name(self.root, self.planned.name, os.environ):
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
        ready any more, or when only a start empties its caches. A start that fails is not tried again for each of the
        points that are left."""
        self.show.note(f"deployment: {deployment.title}")
        start: _Start | None = None
        try:
            for point in its_points:
                caches: Mapping[str, str] | None = None
                if start is None or (start.error is None and (caches := self._emptied(deployment, start)) is None):
                    start = self._start(deployment)
                record = self._measured(point, start, caches)
                self.folder.write(point, record)
                self.on_point(point, record)
        finally:
            try:
                self._down()
            except KeyboardInterrupt:  # what was not asked to stop yet would serve on
                self._down()
                raise

    def _emptied(self, deployment: Variant, start: _Start) -> Mapping[str, str] | None:
        """Empty the caches of a deployment that was measured already, and return what became of each. None: it takes a
        new start, because of a cache, or because the deployment does not serve any more as it was started."""
        name, must = self.planned.name, self.planned.loaded.sweep.restart_to_empty_caches
        why = self.planned.start_for_each_point(deployment)
        if why is None:
            try:
                running = serving(self.root, name, "sweep")
                if (changed := start.unlike(running)) is not None:
                    self.show.note(f"{name}: {changed}; the next point needs a new start")
                    return None
                kept = kept_until_start(self.planned.recipes[deployment.digest].recipe)
                caches = _to_its_end(empty_caches(running, kept))
            except StateError as error:
                self.show.note(f"{name}: {error.what}; the next point needs a new start")
                return None
            if not must or (why := find_full_cache(caches)) is None:
                return caches
        self.show.note(f"{name}: a new start, so that the next point begins with empty caches: {why}")
        return None

    def _start(self, deployment: Variant) -> _Start:
        """Start a deployment and keep the start on record; what runs of this sweep is stopped first."""
        began = time.monotonic()
        self._down()
        self._refuse_others()  # what another one has started meanwhile is not stopped for a point
        recipe = self.planned.recipes[deployment.digest]
        words = recipe_words(recipe.path, set_of(deployment.settings), ())
        begun: list[RunDir] = []

        def begin(run: RunDir) -> None:
            keep_start(run, self.folder.starts)  # a sweep that is killed from now on knows it again
            begun.append(run)

        failed: PdserveError | None = None
        try:
            up(
                recipe,
                choose_destination(recipe, None, this_machine=self.options.this_machine, words=words),
                self.show,
                UpOptions(detach=True, on_begin=begin, goes_on=True),
            )
        except PdserveError as error:
            failed = error
        finally:
            for run in begun:
                keep_start(run, self.folder.starts)
        seconds = time.monotonic() - began
        if failed is not None or not begun:
            todo = f"pdserve down {self.planned.name}, or another name in the recipe"
            failed = failed or StateError(f"{self.planned.name} was started by another pdserve up", todo=todo)
            return _Start(begun[-1].run_id if begun else None, "", seconds, failed)
        return _Start(begun[-1].run_id, plan_digest(begun[-1].read_plan()), seconds)

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

    def _measured(self, point: Point, start: _Start, caches: Mapping[str, str] | None) -> PointRecord:
        """Measure a point on a deployment, and return its record. `caches`: what became of them; None: nothing was
        measured since the start."""
        if start.error is not None:
            return record_failure(point, "start", start.error.render(), run_id=start.run_id)
        began = time.monotonic()
        attempt = new_run_id()  # the salt of its prompts is made of it: it is new in every attempt
        try:
            deployment = serving(self.root, self.planned.name, "sweep")
            if (why := start.unlike(deployment)) is not None:
                return record_failure(point, "deployment", why, run_id=start.run_id)
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
            result = _to_its_end(bench(deployment, task, self.folder.point(point) / attempt, lambda _: None))
        except PdserveError as error:
            seconds = time.monotonic() - began
            return record_failure(point, "measurement", error.render(), run_id=start.run_id, seconds=seconds)
        return record_of(
            point,
            result,
            caches=new_caches(deployment.plan) if caches is None else caches,
            attempt=attempt,
            start_seconds=start.seconds if caches is None else None,
            seconds=time.monotonic() - began,
        )


def _to_its_end(work: Coroutine[Any, Any, _Result]) -> _Result:
    """Run a coroutine. A TERM or HUP is a Ctrl-C in all of a sweep."""
    try:
        return run_to_its_end(work)
    except SystemExit as stop:
        raise KeyboardInterrupt from stop


def _check_clients(some: Sequence[Point]) -> None:
    """Check that the clients are installed: a missing one is no reason to find all of its points INVALID. Raises
    PreflightError."""
    if not all(map(needs_vllm, some)):
        installed_interpreter(os.environ)


GONE = "its result is gone or cannot be read"


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


def is_measured_here(folder: SweepFolder, environ: Mapping[str, str]) -> bool:
    """Return whether a sweep measures on this machine, or on the nodes of the job around it: one that was submitted as
    arrays is only looked at from a login node. Raises StateError."""
    return job_of(environ) is not None or not arrays_of(folder)


def stale_points(planned: PlannedSweep, folder: SweepFolder, *, measured_here: bool) -> Mapping[str, str]:
    """Return by its id why a point that is over is measured again: its result is gone, or it was measured with other
    engines, on other hardware, or with another model than would be used now. What is known of both sides is compared,
    nothing else; where the sweep is not `measured_here`, nothing is. Raises StateError for a record that cannot be
    read."""
    again: dict[str, str] = {}
    hardware = cache(machine)
    for deployment, points in by_deployment(planned.points):
        here: Mapping[str, str] | None = None
        for point in points:
            record = folder.read(point)
            if record is None or record.result is None:
                continue
            try:
                about = read_result(folder.path, str(folder.point(point) / record.result)).provenance
            except StateError:
                again[point.id] = GONE
                continue
            if measured_here:
                recipe = planned.recipes[deployment.digest]
                here = here or circumstances_here(recipe, hardware(recipe.recipe.platform))
                if (why := differences(fixed_circumstances(about), here)) is not None:
                    again[point.id] = why
    return again


def circumstances_here(loaded: LoadedRecipe, hardware: Mapping[str, str]) -> Mapping[str, str]:
    """Return the circumstances of a measurement that is made now, as far as they are known. In an image are other
    versions."""
    versions: Mapping[str, str | None] = {}
    if loaded.recipe.container is None:
        installed = read_versions(loaded.recipe.engine.python, missing_ok=True)
        versions = {package: getattr(installed, package) for package in PACKAGES}
    return circumstances({**versions, CLIENT_CODE: own_pdserve()}, hardware, model_files(loaded))


@dataclass(frozen=True)
class Estimate:
    """Estimates what is still to be run."""

    seconds: float
    """The seconds that are known."""
    unknown_points: int
    """Points whose work and load were never measured."""
    starts: int
    unknown_starts: int


def estimate(to_run: Sequence[Point], former: Sequence[PointRecord], starts: int) -> Estimate:
    """Estimate the time that points take: each as long as those of the same work and load did on other deployments, a
    start as long as others. `starts`: that these points need."""
    measured: dict[tuple[str, str], list[float]] = {}
    for record in former:
        if record.result is not None:
            measured.setdefault(_same(record.workload, record.load), []).append(record.seconds)
    known = [measured.get(_same(point.workload, point.load)) for point in to_run]
    took = [record.start_seconds for record in former if record.start_seconds is not None]
    seconds = sum(statistics.fmean(each) for each in known if each) + (statistics.fmean(took) * starts if took else 0.0)
    return Estimate(seconds, sum(each is None for each in known), starts, 0 if took else starts)


def _same(workload: Workload, load: Load) -> tuple[str, str]:
    return workload.model_dump_json(), load.model_dump_json()
