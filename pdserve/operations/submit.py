"""`pdserve up --slurm` and `run --slurm`: submits the job of a recipe from a login node and follows it."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pdserve.errors import PdserveError, ReportedError, StateError
from pdserve.operations.current_run import last_run
from pdserve.operations.plan_recipe import batch_script, load, plan_for, recipe_words
from pdserve.plan.node import Srun
from pdserve.reach.slurm import Job, cancel, look, submit
from pdserve.run.directory import RunDir, has_living_launcher, home
from pdserve.run.inbox import Down, ask
from pdserve.system.stop_signals import hold_stops

_POLL_SECONDS = 1.0
_LAST_WORDS_SECONDS = 5.0
"""A network file system may show the end of the job's output after Slurm reports its end."""
_DOWN_SECONDS = 600.0
_AWAY_SECONDS = 600.0
_AWAY = "Slurm's controller does not answer; waiting for it"


Print = Callable[[str], None]
"""Gets text as the job has written it, line ends included."""


@dataclass(frozen=True)
class Submission:
    """Holds a job that is not submitted yet."""

    name: str
    """The name of the deployment."""
    script: str


def submission(recipe: Path, set_: Sequence[str], unset: Sequence[str], command: Sequence[str] = ()) -> Submission:
    """Return the job that brings the recipe up; with a `command` it runs that, and takes the deployment down."""
    loaded = load(recipe, set_, unset)
    planned = plan_for(loaded, None, run_dir=f"run-{recipe.stem}", run_id="rendered")
    words = recipe_words(recipe.absolute(), set_, unset)
    return Submission(loaded.recipe.name, batch_script(planned, words, command=command))


def submit_and_follow(wanted: Submission, show: Print, *, detach: bool = False) -> None:
    """Submit a job and follow it. Returns when the job is over, or with `detach` once the deployment is ready. A Ctrl-C
    stops what the job runs, or cancels a job that runs nothing yet. Raises JobError with the job's own exit code when
    it fails."""
    last_run(home(os.environ), wanted.name)  # a record that is not ours is refused before a job waits for it
    following: _Following | None = None
    try:
        with hold_stops():
            job = submit(wanted.script)
            following = _Following(job, wanted.name, show, detach=detach)
            show(f"submitted job {job}; pdserve down {wanted.name} stops it in order, scancel {job} at once\n")
        following.until_over()
    except KeyboardInterrupt:
        if following is not None:
            following.stop()
        raise


class JobError(ReportedError):
    """Says that a job did not end well; its output has been shown."""

    def __init__(self, job: Job) -> None:
        super().__init__(f"job {job.id} ended: {job.state.lower()}; its output: {job.output}", job.exit_code or 1)
        self.has_code = job.exit_code != 0
        """Whether the exit code is its script's: Slurm gives none to a job that its time limit ends."""


class _Following:
    """Shows what the job prints, and its state in Slurm."""

    def __init__(self, job: str, name: str, show: Print, *, detach: bool) -> None:
        self._job = job
        self._name = name
        self._print = show
        self._detach = detach
        self._offset = 0
        self._shown = ""

    def until_over(self) -> None:
        while True:
            job = self._look()
            if str(job) != self._shown:
                self._shown = str(job)
                self._print(f"{self._shown}\n")
            self._show(job)
            if job.over:
                self._end(job)
                return
            if self._detach and (endpoint := self._endpoint()) is not None:
                self._print(f"{self._name} is ready at {endpoint}/v1\n")
                self._print(f"next: pdserve status {self._name} | pdserve logs -f | pdserve down {self._name}\n")
                return
            time.sleep(_POLL_SECONDS)

    def stop(self) -> None:
        """Stop in order, if the launcher runs already; a second Ctrl-C cancels the job."""
        try:
            if (run := self._run()) is None:
                cancel(self._job)
                self._print(f"cancelled job {self._job}\n")
            else:
                with contextlib.suppress(PdserveError):
                    ask(run, Down(), seconds=_DOWN_SECONDS, alive=lambda: has_living_launcher(run, run.read_state()))
            while not (job := self._look()).over:
                self._show(job)
                time.sleep(_POLL_SECONDS)
            self._show(job)
        except KeyboardInterrupt:
            cancel(self._job)

    def _look(self) -> Job:
        """Look, and wait for a controller that is away, as when it is restarted: the job goes on without it."""
        deadline = time.monotonic() + _AWAY_SECONDS
        while (job := look(self._job)) is None:
            if time.monotonic() > deadline:
                raise StateError(
                    f"Slurm's controller has not answered for {_AWAY_SECONDS:.0f} s; job {self._job} may go on",
                    todo=f"scontrol ping; then squeue --job {self._job}, pdserve status {self._name}",
                )
            if self._shown != _AWAY:
                self._shown = _AWAY
                self._print(f"{_AWAY}\n")
            time.sleep(_POLL_SECONDS)
        return job

    def _end(self, job: Job) -> None:
        deadline = time.monotonic() + _LAST_WORDS_SECONDS
        while self._show(job) or (self._offset == 0 and time.monotonic() < deadline):
            time.sleep(_POLL_SECONDS)
        if job.state != "COMPLETED":
            raise JobError(job)

    def _show(self, job: Job) -> bool:
        """Print what is new in the job's output; False if nothing is."""
        if job.output is None:
            return False
        try:
            with job.output.open("rb") as file:
                file.seek(self._offset)
                new = file.read()
        except OSError:
            return False
        whole = new if job.over else new[: new.rfind(b"\n") + 1]
        self._offset += len(whole)
        if whole:
            self._print(whole.decode(errors="replace"))
        return bool(whole)

    def _run(self) -> RunDir | None:
        """Return the run of this job, once it has one."""
        if (last := last_run(home(os.environ), self._name)) is None:
            return None
        run, plan = last
        reach = plan.nodes[0].reach
        return run if isinstance(reach, Srun) and reach.job == self._job else None

    def _endpoint(self) -> str | None:
        """Return the address of the proxy, once the deployment is ready."""
        if (run := self._run()) is None:
            return None
        return next((str(event["endpoint"]) for event in run.read_events()[0] if event["event"] == "up"), None)
