"""Runs the harness against a deployment, once for each repeat."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from pdserve.errors import NotProvenError, PreflightError
from pdserve.evaluation.harness import PROGRAM, Score, configuration, environment, read_score
from pdserve.evaluation.settings import EvalSettings
from pdserve.evaluation.verdict import EvalVerdict
from pdserve.plan.model import Plan
from pdserve.run.directory import RunDir, new_run_id, record_errors
from pdserve.run.state import DeploymentState
from pdserve.system.process import Child, Exit, marker, spawn

_STOP_SECONDS = 10.0
_LAST_LINES = 15


def find_harness(chosen: str | None, environ: Mapping[str, str]) -> str:
    """The path of the program. Raises PreflightError when there is none."""
    beside = str(Path(sys.executable).with_name(PROGRAM))
    path = environ.get("PATH")
    program = shutil.which(chosen or beside, path=path) or (None if chosen else shutil.which(PROGRAM, path=path))
    if program is None:
        raise PreflightError(
            f"there is no program {chosen or PROGRAM}",
            cause="the wrong path" if chosen else "lm-evaluation-harness is not installed with pdserve",
            todo="python -m venv ~/lm-eval && ~/lm-eval/bin/pip install 'lm-eval[api]==0.4.13', "
            "then add --harness ~/lm-eval/bin/lm_eval (or pip install 'pdserve[eval]')",
        )
    return program


async def evaluate(
    run_dir: RunDir,
    state: DeploymentState,
    plan: Plan,
    settings: EvalSettings,
    *,
    harness: str,
    environ: Mapping[str, str],
    on_repeat: Callable[[Score], None],
) -> EvalVerdict:
    """Raises NotProvenError when the harness does not get to a score. Its results stay in the run directory."""
    folder = run_dir.path / "evals" / new_run_id()
    scores: list[Score] = []
    for repeat in range(1, settings.repeats + 1):
        results = folder / f"repeat-{repeat}"
        config, log = results / "config.json", results / "harness.log"
        with record_errors(run_dir):
            run_dir.write(config, json.dumps(configuration(plan, settings, results), indent=2))
        env = environment(plan, environ, run_dir.read_key())
        child = _start(harness, config, env, log, marker(state.run_id, state.token, f"eval.{repeat}"))
        try:
            ended = await child.wait()
        finally:
            await child.stop(_STOP_SECONDS)
        scores.append(_score(results, log, ended, settings.metric))
        on_repeat(scores[-1])
    verdict = EvalVerdict(
        deployment=plan.name,
        task=settings.task,
        metric=scores[0].metric,
        questions=scores[0].questions,
        scores=tuple(score.value for score in scores),
        stderr=scores[0].stderr,
        threshold=settings.threshold,
        folder=str(folder),
    )
    with record_errors(run_dir):
        run_dir.write(folder / "verdict.json", json.dumps(verdict.to_json(), indent=2))
    return verdict


def _start(harness: str, config: Path, env: Mapping[str, str], log: Path, mark: str) -> Child:
    # JSON is YAML.
    argv = [harness, "run", "--config", str(config)]
    try:
        return spawn(argv, env=env, log=log, marker=mark, control_stdin=False)
    except OSError as error:
        raise PreflightError(
            f"the harness cannot be started: {error.strerror or error}",
            where=harness,
            cause="the Python that its first line names is gone (its environment was moved or made anew), or it is no "
            "program of this machine",
            todo="make its environment again: python -m venv, then pip install 'lm-eval[api]==0.4.13'",
        ) from error


def _score(results: Path, log: Path, ended: Exit, metric: str | None) -> Score:
    files = sorted(results.rglob("results_*.json"))
    if ended.code != 0 or not files:
        raise NotProvenError(
            f"the harness {ended}, " + ("without results" if ended.code == 0 else "and there is no score"),
            where=str(log),
            cause="a request failed, the task or its data set is not there, or it needs a tokenizer (likelihoods)",
            todo="see the log; without internet, give a task file whose data is on this machine",
            evidence=tuple(log.read_text(errors="replace").splitlines()[-_LAST_LINES:]),
        )
    try:
        document = json.loads(files[-1].read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise NotProvenError(
            f"the harness's results cannot be read: {error}",
            where=str(files[-1]),
            cause="they were not written whole: the disk is full, or the harness was killed",
            todo="make room on that disk and evaluate again",
        ) from error
    score = read_score(document, metric, str(files[-1]))
    if not score.questions:
        raise NotProvenError(
            "the harness asked no question", where=str(files[-1]), todo="raise --limit, or see the task's data set"
        )
    return score
