"""The trace of a workload."""

from __future__ import annotations

from pathlib import Path

from pdserve.bench.traces.read import read_trace
from pdserve.bench.traces.trace import RequestTrace
from pdserve.bench.workload import USUAL_OUTPUT, Workload
from pdserve.errors import RecipeError

_CURRENT = Path()


def with_trace(workload: Workload, folder: Path = _CURRENT) -> tuple[Workload, RequestTrace]:
    """Of a workload that names one, relative to `folder`: with its digest. Raises RecipeError when it cannot be read,
    or is another one than the workload was written for."""
    if workload.trace is None:
        raise ValueError("the workload has no trace")
    trace = read_trace(
        workload.trace,
        output_tokens=workload.output_tokens or USUAL_OUTPUT,
        block=workload.trace_block,
        sessions=workload.sessions,
        folder=folder,
    )
    if workload.trace_digest not in (None, trace.digest):
        raise RecipeError(
            "this is another trace than the one that was measured before",
            where=workload.trace,
            cause=f"its SHA-256 is {trace.digest}, and {workload.trace_digest} is asked for",
            todo="give the former file, or leave trace_digest out",
        )
    return workload.model_copy(update={"trace_digest": trace.digest}), trace
