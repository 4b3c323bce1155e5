"""`vllm bench serve` from the engines' environment: its command line and its environment, decided before it starts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pdserve.bench import vllm_client
from pdserve.bench.workload import Load, Workload
from pdserve.errors import PreflightError
from pdserve.plan.model import Plan

NAME = "vllm bench serve"
_KEY = "OPENAI_API_KEY"
"""The client reads it from there and prints it nowhere."""
_PROXIES = ("http_proxy", "https_proxy", "all_proxy")
_PATCHES = "PDSERVE_PATCHES"


@dataclass(frozen=True)
class BenchClient:
    """How the client is started against a deployment."""

    python: str
    """An interpreter that has vLLM."""
    tokenizer: str
    """A folder, or an id of the hub."""

    def argv(self, plan: Plan, workload: Workload, load: Load, *, salt: str, seed: int, result: Path) -> list[str]:
        """A closed loop at a concurrency, Poisson arrivals at a rate. `salt`: prompts of another salt are not in any
        cache, so that the same prompts can be measured again."""
        argv = [
            # -P: the folder of the program is no place to import from.
            *(self.python, "-P", vllm_client.__file__),
            *("--backend", "openai", "--base-url", plan.proxy_url, "--endpoint", "/v1/completions"),
            *("--model", plan.model_path or plan.model, "--served-model-name", plan.served_name),
            *("--tokenizer", self.tokenizer, "--dataset-name", "random", "--random-range-ratio", "0"),
            *("--random-input-len", str(workload.input_tokens), "--random-output-len", str(workload.output_tokens)),
            *("--num-prompts", str(load.requests), "--seed", str(seed), "--temperature", "0"),
            *("--extra-body", json.dumps({"cache_salt": salt})),
            # Its own test request and warm-ups are the first prompt of the measurement, which is then in the caches.
            *("--ready-check-timeout-sec", "0", "--num-warmups", "0"),
            *("--save-result", "--save-detailed", "--disable-tqdm"),
            *("--result-dir", str(result.parent), "--result-filename", result.name),
        ]
        if load.concurrency is not None:
            argv += ["--max-concurrency", str(load.concurrency)]
        if load.rate is not None:
            argv += ["--request-rate", str(load.rate)]
        return argv + (["--insecure"] if plan.proxy.tls is not None else [])

    def environment(self, environ: Mapping[str, str], plan: Plan, key: str) -> dict[str, str]:
        """Ours, without the variables that would send its requests through the site's proxy (it obeys them)."""
        ours = {name: value for name, value in environ.items() if name.lower() not in _PROXIES and name != _PATCHES}
        offline = {"HF_HUB_OFFLINE": "1"} if Path(self.tokenizer).is_absolute() else {}
        return {**ours, **offline, "VLLM_NO_USAGE_STATS": "1", "PYTHONUNBUFFERED": "1", _KEY: key}


def client_of(plan: Plan, *, python: str | None, tokenizer: str | None) -> BenchClient:
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
    return BenchClient(program, tokenizer or plan.model_path or plan.model)
