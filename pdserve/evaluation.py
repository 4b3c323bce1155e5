"""The accuracy gate of `pdserve eval`: lm-evaluation-harness, run against a deployment once for each repeat.

Written against lm_eval 0.4.13. Its `local-completions` model sends text to /v1/completions and needs no tokenizer then.
That leaves tasks that generate text, such as GSM8K. Tasks that compare likelihoods need the tokenizer and the
logprobs of the prompt, which no decode computes: they would not look at transferred KV.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict

from pdserve.errors import NotProvenError, PreflightError, VerifyError
from pdserve.plan.model import Plan
from pdserve.run.directory import RunDir, new_run_id, record_errors
from pdserve.run.state import DeploymentState
from pdserve.system.process import Child, Exit, marker, spawn


@dataclass(frozen=True)
class EvalSettings:
    """One task, asked `repeats` times."""

    task: str
    """A name that the harness knows, or the absolute path of a task file (.yaml)."""
    threshold: float
    """The mean of the repeats must reach it."""
    metric: str | None = None
    """The name in the harness's results, for example `exact_match,strict-match`. None: the task has only one."""
    repeats: int = 1
    limit: int | None = None
    """Questions of the task; None: all."""
    fewshot: int | None = None
    """Examples before each question; None: as the task has it."""
    concurrency: int = 8


class EvalVerdict(BaseModel):
    """Holds the verdict on one task. It is kept as verdict.json beside the harness's own results."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    deployment: str
    task: str
    metric: str
    questions: int
    scores: tuple[float, ...]
    """The scores of each repeat."""
    stderr: float | None
    """The harness's own estimate for one repeat."""
    threshold: float
    folder: str
    """Where the harness's results, samples and log are."""

    @property
    def mean(self) -> float:
        return sum(self.scores) / len(self.scores)

    @property
    def passed(self) -> bool:
        return self.mean >= self.threshold

    def raise_for_status(self) -> None:
        """Raise VerifyError when the mean is below the threshold."""
        if not self.passed:
            raise VerifyError(
                f"{self.task}: {self.metric} is {self.mean:.4f}, at least {self.threshold:g} was asked for",
                where=self.deployment,
                cause="the deployment answers worse than the threshold, or the threshold is not this model's",
                todo=f"see the samples in {self.folder}; pdserve verify --load shows whether KV is wrong",
            )

    def to_json(self) -> dict[str, Any]:
        """Return plain data, ready for json.dumps."""
        return self.model_dump(mode="json") | {"mean": self.mean, "passed": self.passed}


PROGRAM = "lm_eval"
KEY_VARIABLE = "OPENAI_API_KEY"
"""Where `local-completions` reads the key of the endpoint."""
_STDERR = "_stderr"


@dataclass(frozen=True)
class Score:
    """The score of one run of the harness."""

    value: float
    stderr: float | None
    """The harness's own estimate, from the number of questions. None: it has none."""
    questions: int
    metric: str


def configuration(plan: Plan, settings: EvalSettings, results: Path) -> dict[str, Any]:
    """Return the configuration for `lm_eval run --config`. No secret is in it."""
    fields = {
        "model": "local-completions",
        "model_args": {
            "model": plan.served_name,
            "base_url": f"{plan.proxy_url}/v1/completions",
            "tokenizer_backend": "none",
            "tokenized_requests": False,
            "num_concurrent": settings.concurrency,
            # An answer that only a second attempt brings is not one that users get.
            "max_retries": 1,
            "timeout": int(plan.proxy.request_timeout_seconds),
            # The proxy's own certificate may be one that this machine does not know.
            "verify_certificate": plan.proxy.tls is None,
        },
        "tasks": [settings.task],
        "batch_size": 1,
        "num_fewshot": settings.fewshot,
        "limit": settings.limit,
        "output_path": str(results),
        "log_samples": True,
    }
    return {name: value for name, value in fields.items() if value is not None}


def environment(plan: Plan, environ: Mapping[str, str], key: str) -> dict[str, str]:
    """Return the harness's environment. The endpoint is asked directly: an HTTP proxy of the environment is for
    downloads of data sets."""
    direct = [environ.get("NO_PROXY") or environ.get("no_proxy") or "", urlsplit(plan.proxy_url).hostname or ""]
    no_proxy = ",".join(host for host in direct if host)
    return {**environ, KEY_VARIABLE: key, "NO_PROXY": no_proxy, "no_proxy": no_proxy}


def read_score(document: Mapping[str, Any], metric: str | None, where: str) -> Score:
    """Read the score from the results of one task. Raises NotProvenError when the metric is not there, or there is a
    choice."""
    try:
        task, figures = next(iter(document["results"].items()))
        parts = len(document["results"])
        metrics = {
            name: figure
            for name, figure in figures.items()
            if isinstance(figure, int | float) and "," in name and not name.partition(",")[0].endswith(_STDERR)
        }
        questions = int(document["n-samples"][task]["effective"]) if task in document["n-samples"] else 0
        better = document["higher_is_better"].get(task) or {}
    except (KeyError, TypeError, AttributeError, StopIteration, ValueError) as error:
        raise NotProvenError(
            f"the harness's results cannot be read: {type(error).__name__} {error}",
            where=where,
            cause="another version of lm_eval has other results",
            todo="pip install 'lm-eval[api]==0.4.13'",
        ) from error
    if parts > 1:
        raise NotProvenError(
            f"the results are of {parts} tasks", where=where, todo="give one task, not a group, and evaluate each part"
        )
    name = metric or (next(iter(metrics)) if len(metrics) == 1 else "")
    if name not in metrics:
        known = ", ".join(map(repr, metrics)) or "none"
        raise NotProvenError(
            f"the task {task} has no metric {name}" if name else f"the task {task} has not one metric",
            where=where,
            todo=f"give --metric: {known}",
        )
    kind, _, filtered = name.partition(",")
    if better.get(kind) is False:
        raise NotProvenError(
            f"of the metric {name} less is better: it has no least value", where=where, todo="give another --metric"
        )
    stderr = figures.get(f"{kind}{_STDERR},{filtered}")
    return Score(
        value=float(metrics[name]),
        stderr=float(stderr) if isinstance(stderr, int | float) else None,
        questions=questions,
        metric=name,
    )


_STOP_SECONDS = 10.0
_LAST_LINES = 15


def find_harness(chosen: str | None, environ: Mapping[str, str]) -> str:
    """Return the path of the program. Raises PreflightError when there is none."""
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
    """Score a deployment with the harness, as often as `settings` says, and return the verdict. Raises NotProvenError
    when the harness does not get to a score. Its results stay in the run directory."""
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
    score = read_score(json.loads(files[-1].read_bytes()), metric, str(files[-1]))
    if not score.questions:
        raise NotProvenError(
            "the harness asked no question", where=str(files[-1]), todo="raise --limit, or see the task's data set"
        )
    return score
