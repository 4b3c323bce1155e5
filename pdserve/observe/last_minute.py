"""What a deployment did within the last minute, from the counters of its processes. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.observe.engine_metrics import FAILED_TRANSFERS
from pdserve.observe.window import MetricsWindow
from pdserve.pd.telemetry.metrics_page import PREFIX

_PROXY = "proxy"
_TTFT, _ITL = "vllm:time_to_first_token_seconds", "vllm:inter_token_latency_seconds"
_SOURCES = "vllm:prompt_tokens_by_source_total"


@dataclass(frozen=True)
class Latency:
    """Seconds, estimated from the buckets of a histogram. None: nothing was observed."""

    count: int
    p50: float | None
    p90: float | None
    p99: float | None
    largest_bound: float
    """An estimate that has this value may be anything above it."""


@dataclass(frozen=True)
class MinuteTraffic:
    """What clients had. None: not reported."""

    measured_by: str
    """The proxy, or the engines that write answers where the proxy has no such figures."""
    seconds: float
    """What the figures are of: less than a minute at first."""
    requests: float | None
    """Answered, a second; so are the next ones."""
    errors: float | None
    """Through engines or proxy, not through clients."""
    refused: float | None
    """429 of a full pool."""
    failovers: float | None
    prompt_tokens: float | None
    """As the engines that write answers count them, and so are the next ones: the proxy sees those of a stream only if
    its client asked for usage."""
    output_tokens: float | None
    ttft: Latency | None
    itl: Latency | None
    kv_transfer: Latency | None
    """An upper bound: from prefill's answer to decode's first byte."""


@dataclass(frozen=True)
class EngineMinute:
    """Of one engine, tokens a second. None: not reported."""

    computed: float | None
    received: float | None
    """Prompt tokens whose KV was transferred to it."""
    generated: float | None
    prefix_hit_rate: float | None
    external_hit_rate: float | None
    preemptions: float | None
    """In the whole window, and so are the failures."""
    failed_transfers: float | None


@dataclass(frozen=True)
class CacheMinute:
    """Of one LMCache server. Chunks a second."""

    hit_rate: float | None
    stored: float | None
    read: float | None
    evicted: float | None


def traffic(window: MetricsWindow, writers: Sequence[str]) -> MinuteTraffic:
    """`writers`: the engines that write answers, whose figures count where the proxy has none."""
    prompts = _sum([window.rate(name, "vllm:prompt_tokens_total") for name in writers])
    outputs = _sum([window.rate(name, "vllm:generation_tokens_total") for name in writers])
    if window.seconds(_PROXY):
        return _of_proxy(window, prompts, outputs)
    answered = [window.rate(name, "vllm:request_success_total") for name in writers]
    return MinuteTraffic(
        measured_by="engines",
        seconds=max(map(window.seconds, writers), default=0.0),
        requests=_sum(answered),
        errors=None,
        refused=None,
        failovers=None,
        prompt_tokens=prompts,
        output_tokens=outputs,
        ttft=_latency(window, writers, _TTFT),
        itl=_latency(window, writers, _ITL),
        kv_transfer=None,
    )


def _of_proxy(window: MetricsWindow, prompts: float | None, outputs: float | None) -> MinuteTraffic:
    def rate(name: str, **labels: str) -> float | None:
        return window.rate(_PROXY, f"{PREFIX}{name}_total", **labels)

    def counted(*rates: float | None) -> float:
        """A series with labels is not there before its first count."""
        return sum(each or 0.0 for each in rates)

    return MinuteTraffic(
        measured_by="proxy",
        seconds=window.seconds(_PROXY),
        requests=counted(rate("requests")),
        errors=counted(rate("errors", blame="worker"), rate("errors", blame="proxy")),
        refused=counted(rate("admission_rejections")),
        failovers=counted(rate("failovers")),
        prompt_tokens=prompts,
        output_tokens=outputs,
        ttft=_latency(window, [_PROXY], f"{PREFIX}ttft_seconds"),
        itl=_latency(window, [_PROXY], f"{PREFIX}itl_seconds"),
        kv_transfer=_latency(window, [_PROXY], f"{PREFIX}kv_transfer_seconds"),
    )


def engine_minute(window: MetricsWindow, name: str) -> EngineMinute:
    """Of one engine, its data-parallel ranks together."""
    by_vllm = _sum([window.increase(name, metric) for metric in FAILED_TRANSFERS])
    pulls = window.increase(name, "pdserve_patch_effects_total", patch="mooncake-pulls", effect="pulls-failed")
    # The same pulls. Before vllm 0.33 vLLM leaves some out, and without its patch it exports none.
    failed = max((count for count in (by_vllm, pulls) if count is not None), default=None)
    return EngineMinute(
        computed=window.rate(name, _SOURCES, source="local_compute"),
        received=window.rate(name, _SOURCES, source="external_kv_transfer"),
        generated=window.rate(name, "vllm:generation_tokens_total"),
        prefix_hit_rate=_share(window, name, "vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"),
        external_hit_rate=_share(
            window, name, "vllm:external_prefix_cache_hits_total", "vllm:external_prefix_cache_queries_total"
        ),
        preemptions=window.increase(name, "vllm:num_preemptions_total"),
        failed_transfers=failed,
    )


def cache_minute(window: MetricsWindow, name: str) -> CacheMinute:
    """Of one LMCache server, all salts together."""
    return CacheMinute(
        hit_rate=_share(window, name, "lmcache_mp_lookup_hit_tokens_total", "lmcache_mp_lookup_requested_tokens_total"),
        stored=window.rate(name, "lmcache_mp_l1_write_chunks_total"),
        read=window.rate(name, "lmcache_mp_l1_read_chunks_total"),
        evicted=window.rate(name, "lmcache_mp_l1_evicted_chunks_total"),
    )


def _latency(window: MetricsWindow, processes: Sequence[str], name: str) -> Latency | None:
    seen = window.distribution(processes, name)
    if seen is None:
        return None
    p50, p90, p99 = (seen.quantile(share) for share in (0.5, 0.9, 0.99))
    return Latency(round(seen.count), p50, p90, p99, seen.largest_bound)


def _share(window: MetricsWindow, name: str, part: str, whole: str) -> float | None:
    hits, asked = window.increase(name, part), window.increase(name, whole)
    return hits / asked if hits is not None and asked else None


def _sum(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None
