"""From the counters of a window to shares of prompts and seconds of requests. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from pdserve.bench.result import Measurement

SOURCES = ("computed", "engine's own cache", "cache tier")
STAGES = ("queue", "prefill", "transfer", "decode")


def prompt_sources(each: Measurement) -> Mapping[str, float]:
    """Per cent of the prompt tokens on prefill; empty: the engines do not count them."""
    prefill = each.window.prefill
    counted = [prefill.get(name, 0.0) for name in ("computed", "local_hits", "received")]
    total = sum(counted)
    return {name: 100 * value / total for name, value in zip(SOURCES, counted, strict=True)} if total else {}


def stages(each: Measurement) -> Mapping[str, float]:
    """Mean seconds a completed request; empty: there is none."""
    window, done = each.window, each.figures.completed
    if not done:
        return {}
    # One engine that does both counts its decoding with its prefill.
    decode = window.decode or window.prefill
    seconds = (
        window.proxy.get("queue_seconds", 0.0) + window.prefill.get("queue_seconds", 0.0),
        window.prefill.get("prefill_seconds", 0.0),
        window.proxy.get("transfer_seconds", 0.0),
        decode.get("decode_seconds", 0.0),
    )
    return {name: value / done for name, value in zip(STAGES, seconds, strict=True)}
