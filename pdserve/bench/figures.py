"""Figures of a client, computed from its own record of each request: the same arithmetic for every client."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pdserve.bench.workload import SloMetric
from pdserve.plan.frozen import Frozen


@dataclass(frozen=True)
class RequestRecord:
    """A request of the measured window."""

    started: float
    ok: bool
    prompt_tokens: int
    """The count of the server."""
    output_tokens: int
    """The count of the server."""
    ttft: float
    gaps: tuple[float, ...]
    """The seconds between each two chunks of the answer. A chunk can hold several tokens."""
    e2e: float
    error: str = ""
    asked_output: int | None = None
    """Tokens that this answer was asked for, where each has a length of its own (a trace)."""
    cut: bool = False
    """It was open when the time of the load was over: neither answered nor failed."""

    @property
    def ended(self) -> float:
        return self.started + self.e2e

    @property
    def tpot(self) -> float | None:
        """Mean time of a token after the first; None for an answer of a single token."""
        return (self.e2e - self.ttft) / (self.output_tokens - 1) if self.output_tokens > 1 else None


class UnreadableResultError(ValueError):
    """The file is no result of this client, or is not whole."""


def read_vllm_records(text: str) -> tuple[RequestRecord, ...]:
    """Return the records in a file that `vllm bench serve --save-detailed` wrote. Raises UnreadableResultError.

    The client does not write whether a request succeeded. A failed request has an error or no token: an HTTP error
    without a reason phrase has an empty error text.
    """
    try:
        raw: dict[str, Any] = json.loads(text)
        rows = zip(
            raw["start_times"],
            raw["input_lens"],
            raw["output_lens"],
            raw["ttfts"],
            raw["itls"],
            raw["latencies"],
            raw["errors"],
            strict=True,
        )
        return tuple(
            RequestRecord(
                started=float(started),
                ok=not error and int(output) > 0,
                prompt_tokens=int(prompt),
                output_tokens=int(output),
                ttft=float(ttft),
                gaps=tuple(map(float, gaps)),
                e2e=float(e2e),
                error=last_line(str(error)),
            )
            for started, prompt, output, ttft, gaps, e2e, error in rows
        )
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise UnreadableResultError(f"{type(error).__name__}: {error}") from error


def last_line(text: str) -> str:
    """Return the last line of a text; of a traceback that is the exception. Half a surrogate pair, which JSON lets
    through and no file takes, is escaped."""
    lines = text.strip().splitlines()
    return lines[-1].encode(errors="backslashreplace").decode() if lines else ""


PERCENTILES = (50, 90, 95, 99)
_MS = 1000.0


class Spread(Frozen):
    """Holds a mean and quantiles, in milliseconds."""

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float


class Figures(Frozen):
    """Holds the client's figures of a measured window. None: there is nothing to compute it from."""

    requests: int
    completed: int
    cut: int = 0
    """Open when the time of the load was over: neither answered nor failed."""
    seconds: float
    """From the first request to the end of the last answer; where requests were open at the end, at least to the end of
    the time in which they were sent: in what came after the last answer nothing was answered."""
    ttft: Spread | None = None
    tpot: Spread | None = None
    """The TPOT of each request: the mean time of a token after the first."""
    itl: Spread | None = None
    """The ITL of all gaps between two chunks, of all requests together."""
    e2e: Spread | None = None
    input_tokens: int = 0
    output_tokens: int = 0
    tokens_per_chunk: float | None = None
    """Above 1: chunks hold several tokens, and a gap is not the time of a token."""
    requests_per_second: float = 0.0
    output_per_second: float = 0.0
    total_per_second: float = 0.0
    gpus: int = 0
    """The GPUs of prefill and decode together."""
    output_per_second_per_gpu: float | None = None
    total_per_second_per_gpu: float | None = None
    interactivity_by_itl: Mapping[str, float] = {}
    """Tokens a second that a user sees, as 1000/ITL at each percentile (InferenceX's definition)."""
    interactivity_by_tpot: float | None = None
    """Tokens a second that a user sees, as 1000/mean TPOT (srt-slurm's definition)."""
    goodput: float | None = None
    """Requests a second that kept every limit of the SLO; None without an SLO."""
    good_share: float | None = None
    """The share of all requests, failed ones too, that kept every limit."""


def figures(
    records: Sequence[RequestRecord], *, gpus: int, slo: Mapping[SloMetric, float], load_seconds: float | None = None
) -> Figures:
    """Compute the figures of these requests: only those that were answered have times, failed ones count in `requests`
    and against the SLO. `load_seconds`: the time in which requests were sent, if it was limited."""
    done = [record for record in records if record.ok]
    if not done:
        cut = sum(record.cut for record in records)
        return Figures(requests=len(records), completed=0, cut=cut, seconds=0.0, gpus=gpus)
    seconds = max(record.ended for record in done) - min(record.started for record in records)
    if load_seconds is not None and any(record.cut for record in records):
        seconds = max(seconds, load_seconds)
    gaps = [gap for record in done for gap in record.gaps]
    inputs, outputs = sum(r.prompt_tokens for r in done), sum(r.output_tokens for r in done)
    tpot, itl = _spread([r.tpot for r in done if r.tpot is not None]), _spread(gaps)
    good = sum(keeps_limits(record, slo) for record in done)

    def per_second(count: float) -> float:
        return count / seconds if seconds > 0 else 0.0

    return Figures(
        requests=len(records),
        completed=len(done),
        cut=sum(record.cut for record in records),
        seconds=seconds,
        ttft=_spread([record.ttft for record in done]),
        tpot=tpot,
        itl=itl,
        e2e=_spread([record.e2e for record in done]),
        input_tokens=inputs,
        output_tokens=outputs,
        tokens_per_chunk=outputs / (len(gaps) + len(done)),
        requests_per_second=per_second(len(done)),
        output_per_second=per_second(outputs),
        total_per_second=per_second(inputs + outputs),
        gpus=gpus,
        output_per_second_per_gpu=per_second(outputs) / gpus if gpus else None,
        total_per_second_per_gpu=per_second(inputs + outputs) / gpus if gpus else None,
        interactivity_by_itl={f"p{p}": _MS / at for p in PERCENTILES if itl and (at := getattr(itl, f"p{p}")) > 0},
        interactivity_by_tpot=_MS / tpot.mean if tpot and tpot.mean > 0 else None,
        goodput=per_second(good) if slo else None,
        good_share=good / len(records) if slo else None,
    )


def keeps_limits(record: RequestRecord, slo: Mapping[SloMetric, float]) -> bool:
    """Return whether a request was answered within every limit. An answer of a single token has no TPOT and no gap."""
    took: dict[SloMetric, float | None] = {
        "ttft": record.ttft,
        "tpot": record.tpot,
        "itl": _percentile(record.gaps, 99) if record.gaps else None,
        "e2e": record.e2e,
    }
    return record.ok and all((took[metric] or 0.0) * _MS <= limit for metric, limit in slo.items())


def _spread(seconds: Sequence[float]) -> Spread | None:
    if not seconds:
        return None
    points = {f"p{percent}": _percentile(seconds, percent) * _MS for percent in PERCENTILES}
    return Spread(mean=statistics.fmean(seconds) * _MS, **points)


def _percentile(values: Sequence[float], percent: int) -> float:
    """Return the percentile with linear interpolation, as numpy's default and so as `vllm bench serve` has it."""
    if len(values) == 1:
        return values[0]
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]
