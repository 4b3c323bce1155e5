"""Which client sends the requests of a workload."""

from __future__ import annotations

from collections.abc import Mapping

from pdserve.bench.aiperf.client import AiperfClient
from pdserve.bench.aiperf.environment import installed_interpreter
from pdserve.bench.clients.client import LoadClient
from pdserve.bench.clients.vllm import vllm_client
from pdserve.bench.traces.trace import RequestTrace
from pdserve.bench.workload import Load, Workload
from pdserve.plan.model import Plan


def client_of(
    plan: Plan,
    workload: Workload,
    load: Load,
    trace: RequestTrace | None,
    environ: Mapping[str, str],
    *,
    python: str | None,
    tokenizer: str | None,
) -> LoadClient:
    """`python` None: the interpreter of the engines, or that of `pdserve bench --setup`. Raises PreflightError when
    there is none."""
    if workload.client_for(load) == "vllm":
        return vllm_client(plan, python=python, tokenizer=tokenizer)
    return AiperfClient(python or installed_interpreter(environ), tokenizer or plan.model_path or plan.model, trace)
