"""lm-evaluation-harness: what it is given, and how its results are read. Pure; pdserve/evaluation/run.py starts it.

Written against lm_eval 0.4.13. Its `local-completions` model sends text to /v1/completions and needs no tokenizer then.
That leaves tasks that generate text, such as GSM8K. Tasks that compare likelihoods need the tokenizer and the
logprobs of the prompt, which no decode computes: they would not look at transferred KV.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pdserve.errors import NotProvenError
from pdserve.evaluation.settings import EvalSettings
from pdserve.plan.model import Plan

PROGRAM = "lm_eval"
KEY_VARIABLE = "OPENAI_API_KEY"
"""Where `local-completions` reads the key of the endpoint."""
_STDERR = "_stderr"


@dataclass(frozen=True)
class Score:
    """Of one run of the harness."""

    value: float
    stderr: float | None
    """The harness's own estimate, from the number of questions. None: it has none."""
    questions: int
    metric: str


def configuration(plan: Plan, settings: EvalSettings, results: Path) -> dict[str, Any]:
    """For `lm_eval run --config`. No secret is in it."""
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
    """The endpoint is asked directly: an HTTP proxy of the environment is for downloads of data sets."""
    direct = [environ.get("NO_PROXY") or environ.get("no_proxy") or "", urlsplit(plan.proxy_url).hostname or ""]
    no_proxy = ",".join(host for host in direct if host)
    return {**environ, KEY_VARIABLE: key, "NO_PROXY": no_proxy, "no_proxy": no_proxy}


def read_score(document: Mapping[str, Any], metric: str | None, where: str) -> Score:
    """From the results of one task. Raises NotProvenError when the metric is not there, or there is a choice."""
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
    if not metrics:
        raise NotProvenError(f"the task {task} has no score", where=where, todo="see harness.log beside it")
    if metric is None and len(metrics) > 1:
        raise NotProvenError(
            f"the task {task} has several metrics", where=where, todo=f"give --metric: {', '.join(map(repr, metrics))}"
        )
    name = metric or next(iter(metrics))
    if name not in metrics:
        raise NotProvenError(
            f"the task {task} has no metric {name}", where=where, todo=f"give --metric: {', '.join(map(repr, metrics))}"
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
