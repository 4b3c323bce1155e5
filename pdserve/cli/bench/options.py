"""The lists on the command line of `pdserve bench`, read into the workload's own types."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, get_args

import typer
from pydantic import ValidationError

from pdserve.bench.traces.trace import RequestTrace
from pdserve.bench.traces.use import with_trace
from pdserve.bench.workload import (
    SLO_MEANING,
    USUAL_OUTPUT,
    ClientKind,
    Load,
    SloMetric,
    Workload,
    usual_requests,
)

USUAL_INPUT = 1024


@dataclass(frozen=True)
class Timed:
    """Of --duration and --grace."""

    seconds: float | None = None
    grace_seconds: float | None = None


def workload(**typed: Any) -> Workload:
    """What is sent. The usual lengths are those of no trace. Raises BadParameter."""
    if typed["client"] not in (None, *get_args(ClientKind)):
        raise _bad("--client", f"{typed['client']!r} is no client: {' or '.join(get_args(ClientKind))}")
    if typed["trace"] is None:
        typed |= {
            "input_tokens": typed["input_tokens"] or USUAL_INPUT,
            "output_tokens": typed["output_tokens"] or USUAL_OUTPUT,
        }
    try:
        return Workload(**typed)
    except ValidationError as error:
        raise typer.BadParameter(error.errors()[0]["msg"].removeprefix("Value error, ")) from None


def work(
    some: Workload, concurrencies: str | None, rates: str | None, requests: int | None, timed: Timed
) -> tuple[Workload, tuple[Load, ...], RequestTrace | None]:
    """The workload with the digest of its trace, the loads, the trace. Raises BadParameter and RecipeError."""
    if timed.grace_seconds is not None and timed.seconds is None:
        raise _bad("--grace", "it is the time after --duration: give both")
    if timed.seconds is not None and some.client == "vllm":
        raise _bad("--duration", "vllm bench serve has none: --client aiperf")
    trace = None
    if some.trace is not None:
        if requests is not None:
            raise _bad("--requests", "a trace has its own requests: --sessions takes the first of its sessions")
        some, trace = with_trace(some)
    chosen = loads(concurrencies, rates, requests if trace is None else trace.requests, timed)
    if trace is not None and (most := max((each.concurrency or 0 for each in chosen), default=0)) > trace.roots:
        raise _bad("--concurrency", f"{trace.roots} sessions are never {most} at a time")
    return some, chosen, trace


def loads(
    concurrencies: str | None, rates: str | None, requests: int | None, timed: Timed | None = None
) -> tuple[Load, ...]:
    """Of `1,4,8` and `0.5,1`. Raises BadParameter."""
    many = _numbers("--concurrency", concurrencies)
    if fraction := next((number for number in many if number != int(number)), None):
        raise _bad("--concurrency", f"{fraction:g} is no whole number")
    if requests is not None and (most := max(many, default=0)) > requests:
        raise _bad("--requests", f"{requests} requests are never {most:g} at a time; give {most:g} or more")
    time = vars(timed or Timed())
    chosen = (
        *(Load(concurrency=int(each), requests=requests or usual_requests(each), **time) for each in many),
        *(Load(rate=each, requests=requests or usual_requests(each), **time) for each in _numbers("--rate", rates)),
    )
    if not chosen:
        raise typer.BadParameter("give a load: --concurrency 1,4,8, or --rate 0.5,1")
    return chosen


def slo(text: str | None) -> dict[SloMetric, float]:
    """Of `ttft=500,itl=50`, in milliseconds. Raises BadParameter."""
    limits: dict[SloMetric, float] = {}
    for part in filter(None, (part.strip() for part in (text or "").split(","))):
        name, _, value = part.partition("=")
        metric = next((known for known in get_args(SloMetric) if known == name), None)
        limit = _number(value)
        if metric is None or limit is None:
            names = ", ".join(f"{known} ({meaning})" for known, meaning in SLO_MEANING.items())
            raise _bad("--slo", f"{part!r} is no limit; a limit is NAME=MILLISECONDS, with the names {names}")
        limits[metric] = limit
    return limits


def _numbers(option: str, text: str | None) -> list[float]:
    numbers = []
    for part in filter(None, (part.strip() for part in (text or "").split(","))):
        number = _number(part)
        if number is None:
            raise _bad(option, f"{part!r} is no number above 0; it is a list with commas")
        numbers.append(number)
    return list(dict.fromkeys(numbers))


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if 0 < number < float("inf") else None


def _bad(option: str, text: str) -> typer.BadParameter:
    return typer.BadParameter(text, param_hint=option)
