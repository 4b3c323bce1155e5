"""The lists on the command line of `pdserve bench`, read into the workload's own types."""

from __future__ import annotations

from typing import get_args

import typer

from pdserve.bench.workload import SLO_MEANING, Load, SloMetric, usual_requests


def loads(concurrencies: str | None, rates: str | None, requests: int | None) -> tuple[Load, ...]:
    """Of `1,4,8` and `0.5,1`. Raises BadParameter."""
    many = _numbers("--concurrency", concurrencies)
    if fraction := next((number for number in many if number != int(number)), None):
        raise _bad("--concurrency", f"{fraction:g} is no whole number")
    if requests is not None and (most := max(many, default=0)) > requests:
        raise _bad("--requests", f"{requests} requests are never {most:g} at a time; give {most:g} or more")
    chosen = (
        *(Load(concurrency=int(each), requests=requests or usual_requests(each)) for each in many),
        *(Load(rate=each, requests=requests or usual_requests(each)) for each in _numbers("--rate", rates)),
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
