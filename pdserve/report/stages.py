"""From the counters of a window to shares of prompts and seconds of requests. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from pdserve.bench.result import BenchResult, Measurement

CACHES = ("engine's own cache", "cache tier")
SOURCES = (*CACHES, "computed")
STAGES = ("queue", "prefill", "transfer", "decode")


def prompt_sources(each: Measurement) -> Mapping[str, float]:
    """Per cent of the prompt tokens on prefill; empty: the engines do not count them."""
    prefill = each.window.prefill
    counted = [prefill.get(name, 0.0) for name in ("local_hits", "received", "computed")]
    total = sum(counted)
    return {name: 100 * value / total for name, value in zip(SOURCES, counted, strict=True)} if total else {}


def theoretical_hit(result: BenchResult) -> float:
    """Per cent of the prompt tokens that a cache without limits would have that was empty before. Each measurement has
    a `cache_salt` of its own: a trace has what it repeats itself, and random prompts repeat nothing."""
    return 0.0 if result.trace is None else 100 * result.trace.prefix_hit


def stages(each: Measurement) -> Mapping[str, float]:
    """Mean seconds a completed request. A stage that is not counted is missing."""
    window, done = each.window, each.figures.completed
    if not done:
        return {}
    # One engine that does both counts its decoding with its prefill. Where decode has engines of its own that could not
    # be read, the count of prefill is none of decoding.
    decode = window.prefill if _aggregated(each) else window.decode
    queues = [counts.get("queue_seconds") for counts in (window.proxy, window.prefill)]
    counted = {
        "queue": sum(filter(None, queues)) if any(queue is not None for queue in queues) else None,
        "prefill": window.prefill.get("prefill_seconds"),
        "transfer": window.proxy.get("transfer_seconds"),
        "decode": decode.get("decode_seconds"),
    }
    return {name: seconds / done for name, seconds in counted.items() if seconds is not None}


def _aggregated(each: Measurement) -> bool:
    """By the names of its engines, which begin with their role."""
    return any(name.startswith("aggregated-") for name in each.before.engines)
