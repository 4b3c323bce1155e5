"""What AIPerf is told: its configuration file (version 2.0 of its format), decided before it starts. Pure.

No secret is in it: AIPerf itself puts the variable that is named in place of the key.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pdserve.bench.clients.client import KEY, ClientRun
from pdserve.bench.traces.trace import RequestTrace, TraceFormat
from pdserve.bench.workload import SESSION_HEADER, Load

FORMATS: Mapping[TraceFormat, str] = {
    "mooncake": "mooncake_trace",
    "messages": "mooncake_trace",
    "conversations": "multi_turn",
    "sub-agents": "dag_jsonl",
}
"""As AIPerf names them: a log of messages becomes lines of its Mooncake format, with the messages in them."""


def configuration(
    run: ClientRun, tokenizer: dict[str, Any], artifacts: Path, trace: RequestTrace | None, trace_file: Path | None
) -> dict[str, Any]:
    """`tokenizer`: that section of it; `trace_file`: the lines that AIPerf reads, of `trace`."""
    plan, workload = run.plan, run.workload
    return {
        "schemaVersion": "2.0",
        "randomSeed": run.seed,
        "benchmark": {
            "model": plan.served_name,
            "endpoint": {
                "url": plan.proxy_url,
                # Text completions have no template: their prompts have the length that is asked for.
                "type": "completions" if trace is None else "chat",
                "streaming": True,
                "timeout": plan.proxy.request_timeout_seconds,
                "apiKey": f"${{{KEY}}}",
                "useServerTokenCount": True,
                "useLegacyMaxTokens": True,
                "sessionHeader": workload.session_header or SESSION_HEADER,
                "extra": {"ignore_eos": True, "temperature": 0, "cache_salt": run.salt},
            },
            "tokenizer": tokenizer,
            "dataset": _synthetic(run) if trace is None else _file(trace, trace_file),
            "profiling": _phase(run.load, trace),
            "artifacts": {"dir": str(artifacts), "summary": ["json"], "records": ["jsonl"]},
            # What the engines count is read by us, and over the same window.
            "gpuTelemetry": {"enabled": False},
            "serverMetrics": {"enabled": False},
            "runtime": {"ui": "none"},
        },
    }


def _synthetic(run: ClientRun) -> dict[str, Any]:
    """A prompt of its own for every request, from a random place of its text. Its corpus `random` has ids that follow
    each other, which in a small vocabulary are the same ones in many prompts."""
    prompts = {
        "isl": {"mean": run.workload.input_tokens, "stddev": 0},
        "osl": {"mean": run.workload.output_tokens, "stddev": 0},
    }
    return {"type": "synthetic", "entries": run.load.requests, "prompts": prompts}


def _file(trace: RequestTrace, file: Path | None) -> dict[str, Any]:
    block = {} if trace.block is None else {"blockSize": trace.block}
    return {"type": "file", "path": str(file), "format": FORMATS[trace.format], "sampling": "sequential", **block}


def _phase(load: Load, trace: RequestTrace | None) -> dict[str, Any]:
    """Until all is sent, or the time is over."""
    end: dict[str, Any] = {"requests": load.requests} if trace is None else {"sessions": trace.roots}
    if load.seconds is not None:
        end |= {"duration": load.seconds, "gracePeriod": load.grace}
    if load.rate is not None:
        return {"type": "poisson", "rate": load.rate, **end}
    return {"type": "concurrency", "concurrency": load.concurrency, **end}
