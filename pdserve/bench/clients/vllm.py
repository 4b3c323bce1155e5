"""`vllm bench serve` from the engines' environment: its command line and its environment, decided before it starts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pdserve.bench.clients import vllm_program
from pdserve.bench.clients.client import KEY, ClientRun, direct, pinned_revision, trusts_remote_code
from pdserve.bench.records import RequestRecord, of_vllm
from pdserve.bench.snapshot import Clocks
from pdserve.errors import PreflightError
from pdserve.plan.model import Plan

NAME = "vllm bench serve"


@dataclass(frozen=True)
class VllmClient:
    """How the client is started against a deployment."""

    program: str
    """An interpreter that has vLLM."""
    tokenizer: str
    """A folder, or an id of the hub."""
    name: str = NAME
    timing: tuple[str, ...] = ()
    """It is a single process."""

    @property
    def versions(self) -> Mapping[str, str]:
        """The run has recorded vLLM's, unless --python names another one."""
        return {}

    def prepare(self, run: ClientRun) -> list[str]:
        """A closed loop at a concurrency, Poisson arrivals at a rate."""
        plan, workload, load = run.plan, run.workload, run.load
        argv = [
            # -P: the folder of the program is no place to import from.
            *(self.program, "-P", vllm_program.__file__),
            *("--backend", "openai", "--base-url", plan.proxy_url, "--endpoint", "/v1/completions"),
            *("--model", plan.model_path or plan.model, "--served-model-name", plan.served_name),
            *("--tokenizer", self.tokenizer, "--dataset-name", "random", "--random-range-ratio", "0"),
            *("--random-input-len", str(workload.input_tokens), "--random-output-len", str(workload.output_tokens)),
            *("--num-prompts", str(load.requests), "--seed", str(run.seed), "--temperature", "0"),
            *("--extra-body", json.dumps({"cache_salt": run.salt})),
            # Its own test request and warm-ups are the first prompt of the measurement, which is then in the caches.
            *("--ready-check-timeout-sec", "0", "--num-warmups", "0"),
            *("--save-result", "--save-detailed", "--disable-tqdm"),
            *("--result-dir", str(run.result.parent), "--result-filename", run.result.name),
        ]
        if load.concurrency is not None:
            argv += ["--max-concurrency", str(load.concurrency)]
        if load.rate is not None:
            argv += ["--request-rate", str(load.rate)]
        # It takes no revision: code that nobody has pinned does not run where the recipe pins it.
        if trusts_remote_code(plan, self.tokenizer) and pinned_revision(plan, self.tokenizer) is None:
            argv.append("--trust-remote-code")
        return argv + (["--insecure"] if plan.proxy.tls is not None else [])

    def environment(self, run: ClientRun, environ: Mapping[str, str], key: str) -> dict[str, str]:
        """Without the site's proxy, and without a look at the hub where the tokenizer is a folder."""
        offline = {"HF_HUB_OFFLINE": "1"} if Path(self.tokenizer).is_absolute() else {}
        return {**direct(environ), **offline, "VLLM_NO_USAGE_STATS": "1", "PYTHONUNBUFFERED": "1", KEY: key}

    def records(self, run: ClientRun, clocks: Clocks) -> tuple[RequestRecord, ...]:
        """It counts by the monotonic clock already."""
        return of_vllm(run.result.read_text(encoding="utf-8", errors="replace"))

    def clean(self, run: ClientRun) -> None:
        """It leaves nothing."""


def vllm_client(plan: Plan, *, python: str | None, tokenizer: str | None) -> VllmClient:
    """`python` None: the interpreter of the engines. Raises PreflightError when that is not known."""
    engine = next(process for process in plan.processes if process.is_engine and process.probe is not None)
    program = python or engine.argv[0]
    if not Path(program).name.startswith("python"):
        raise PreflightError(
            "there is no client: the interpreter of the engines is not known",
            where=engine.name,
            cause=f"its command is not Python but {program}",
            todo="--python /path/to/python of an environment that has vLLM",
        )
    return VllmClient(program, tokenizer or plan.model_path or plan.model)
