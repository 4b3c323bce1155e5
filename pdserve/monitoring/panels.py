"""What the dashboard shows, from the client's side down to the caches: rows of panels, as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pdserve.monitoring.parts import Part
from pdserve.monitoring.queries import SELECTED, Query, counted, each, quantiles, rate, share
from pdserve.pd.telemetry.metrics_page import PREFIX

Unit = Literal["s", "percentunit", "reqps", "bytes", "Bps", "short", "ops"]
"""Grafana's ids of units."""


@dataclass(frozen=True)
class Panel:
    """One graph over time."""

    title: str
    about: str
    unit: Unit
    queries: tuple[Query, ...]
    stacked: bool = False


@dataclass(frozen=True)
class PanelRow:
    """A heading and its panels; only there if the deployment has the part."""

    title: str
    part: Part
    panels: tuple[Panel, ...]


def _graph(title: str, about: str, unit: Unit, *queries: Query, stacked: bool = False) -> Panel:
    return Panel(title, about, unit, queries, stacked)


_P = PREFIX
_LATENCIES = (
    _graph(
        "Time to first token",
        "From the request's last byte to the first byte of the answer's content, as clients see it.",
        "s",
        *quantiles(f"{_P}ttft_seconds"),
    ),
    _graph(
        "Time between chunks",
        "Between two chunks of a stream, as clients see it: one token each, unless the engine joins some.",
        "s",
        *quantiles(f"{_P}itl_seconds"),
    ),
    _graph("Whole request", "First byte in to last byte out.", "s", *quantiles(f"{_P}e2e_seconds")),
    _graph(
        "Where the time goes (p90)",
        "KV transfer is an upper bound: from prefill's answer to decode's first byte.",
        "s",
        *(
            Query(f"histogram_quantile(0.9, {rate(f'{_P}{stage}_seconds_bucket', 'le')})", stage)
            for stage in ("queue", "prefill", "kv_transfer", "ttft")
        ),
    ),
)

ROWS: tuple[PanelRow, ...] = (
    PanelRow(
        "Clients",
        "proxy",
        (
            _graph(
                "Requests",
                "Answered requests by status.",
                "reqps",
                counted(f"{_P}requests_total", "status"),
                stacked=True,
            ),
            _graph(
                "Errors",
                "By who is to blame: client, limit, worker, proxy. And streams that ended with an error.",
                "reqps",
                counted(f"{_P}errors_total", "blame"),
                counted(f"{_P}stream_errors_total", "worker", named="stream of"),
            ),
            *_LATENCIES,
            _graph(
                "Tokens of answers with usage",
                "Per second. A stream has usage only if its client asked. Cached: prompt tokens that prefill had.",
                "short",
                *(
                    Query(rate(f"{_P}{name}_total", "deployment"), name.replace("_", " "))
                    for name in ("prompt_tokens", "cached_prompt_tokens", "completion_tokens")
                ),
            ),
            _graph(
                "Waiting at the proxy",
                "Requests that wait for a place in a pool, and 429 when there is none; and those that wait because no "
                "engine of a role is ready.",
                "short",
                each(f"{_P}queue_depth", "pool"),
                each(f"{_P}held_requests", "role"),
                counted(f"{_P}admission_rejections_total", "pool", "reason", named="429/s"),
            ),
            _graph("In flight", "Legs at each worker.", "short", each(f"{_P}in_flight", "worker"), stacked=True),
            _graph(
                "Workers that get requests",
                "1: requests are sent to it. 0: dead, not answering, draining, or its breaker is open.",
                "short",
                each(f"{_P}worker_ready", "worker", "min"),
            ),
            _graph(
                "Second attempts and clients that left",
                "Failovers to another worker by reason; cancellations by the stage that the client left in.",
                "ops",
                counted(f"{_P}failovers_total", "role", "reason", named="failover"),
                counted(f"{_P}cancellations_total", "stage", named="left in"),
            ),
        ),
    ),
    PanelRow(
        "Engines",
        "engines",
        (
            _graph("Running", "Requests in the batch.", "short", each("vllm:num_requests_running", "process")),
            _graph("Waiting", "Requests in its queue.", "short", each("vllm:num_requests_waiting", "process")),
            _graph(
                "KV cache in use",
                "Of the fullest data-parallel rank. An idle engine repeats its last value.",
                "percentunit",
                each("vllm:kv_cache_usage_perc", "process", "max"),
            ),
            _graph(
                "Prompt tokens by source",
                "computed here, hit in its own prefix cache, or received (on decode from prefill, on prefill from a "
                "cache). A decode that computes prompts has lost its transfers.",
                "short",
                counted("vllm:prompt_tokens_by_source_total", "process", "source"),
                stacked=True,
            ),
            _graph(
                "Prefix cache hits",
                "Share of the prompt tokens that its own cache had.",
                "percentunit",
                share("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total", "process"),
            ),
            _graph(
                "External hits",
                "Share of the looked-up tokens that a connector can load. About 100 % on decode is disaggregation.",
                "percentunit",
                share("vllm:external_prefix_cache_hits_total", "vllm:external_prefix_cache_queries_total", "process"),
            ),
            _graph(
                "Generated tokens",
                "Per second.",
                "short",
                counted("vllm:generation_tokens_total", "process"),
                stacked=True,
            ),
            _graph(
                "Queue time (p50, p90, p99)",
                "In the engine, before it is scheduled.",
                "s",
                *quantiles("vllm:request_queue_time_seconds", "role"),
            ),
            _graph(
                "Time between tokens (p50, p90, p99)",
                "As the engine sees it.",
                "s",
                *quantiles("vllm:inter_token_latency_seconds", "role"),
            ),
            _graph(
                "Preemptions",
                "Requests whose KV was dropped for want of room.",
                "ops",
                counted("vllm:num_preemptions_total", "process"),
            ),
        ),
    ),
    PanelRow(
        "KV transfer: Mooncake",
        "mooncake",
        (
            _graph(
                "Bytes",
                "Per second, sent: prefill writes the KV into decode's memory.",
                "Bps",
                counted("vllm:mooncake_bytes_transferred_sum", "process"),
                stacked=True,
            ),
            _graph("Duration", "Of one transfer.", "s", *quantiles("vllm:mooncake_xfer_time_seconds")),
            _graph(
                "Failures",
                "Transfers that prefill could not write, prompts that decode did not get, and KV that no decode asked "
                "for in time.",
                "ops",
                counted("vllm:mooncake_num_failed_transfers_total", "process", named="failed"),
                counted("vllm:mooncake_num_failed_recvs_total", "process", named="not received"),
                counted("vllm:mooncake_num_kv_expired_reqs_total", "process", named="expired"),
            ),
            _graph(
                "What the patches counted",
                "Pulls that failed, prefills that were gone, transfers withdrawn, sockets that were lacking.",
                "ops",
                counted(
                    "pdserve_patch_effects_total",
                    "process",
                    "patch",
                    "effect",
                    selector='patch=~"mooncake-.*"',
                    shown=("process", "effect"),
                ),
            ),
        ),
    ),
    PanelRow(
        "KV transfer: NIXL",
        "nixl",
        (
            _graph(
                "Bytes",
                "Per second, received.",
                "Bps",
                counted("vllm:nixl_bytes_transferred_sum", "process"),
                stacked=True,
            ),
            _graph("Duration", "Of one transfer.", "s", *quantiles("vllm:nixl_xfer_time_seconds")),
            _graph(
                "Failures",
                "Failed transfers, and KV that no decode fetched in time.",
                "ops",
                counted("vllm:nixl_num_failed_transfers_total", "process", named="failed"),
                counted("vllm:nixl_num_kv_expired_reqs_total", "process", named="expired"),
            ),
        ),
    ),
    PanelRow(
        "LMCache",
        "lmcache",
        (
            _graph("L1 in use", "Share of its memory.", "percentunit", each("lmcache_mp_l1_usage_ratio", "process")),
            _graph(
                "Hits",
                "Share of the looked-up tokens that it has.",
                "percentunit",
                share("lmcache_mp_lookup_hit_tokens_total", "lmcache_mp_lookup_requested_tokens_total", "process"),
            ),
            _graph(
                "Chunks",
                "Per second: stored, read, evicted.",
                "ops",
                *(
                    counted(f"lmcache_mp_l1_{what}_chunks_total", "process", named=what)
                    for what in ("write", "read", "evicted")
                ),
            ),
            _graph(
                "Failures",
                "Chunks without room, chunks that were gone when they were read, and timeouts.",
                "ops",
                counted("lmcache_mp_l1_allocation_failure_chunks_total", "process", named="no room"),
                counted("lmcache_mp_l1_read_failure_chunks_total", "process", named="not readable"),
                counted("lmcache_mp_timeouts_total", "process", named="timeouts"),
            ),
        ),
    ),
    PanelRow(
        "Mooncake store",
        "mooncake-store",
        (
            _graph(
                "Pool in use",
                "Bytes of its capacity.",
                "bytes",
                Query(f"sum(master_allocated_bytes{{{SELECTED}}})", "used"),
                Query(f"sum(master_total_capacity_bytes{{{SELECTED}}})", "capacity"),
            ),
            _graph("Keys", "In the pool.", "short", each("master_key_count", "process")),
            _graph(
                "Operations",
                "Keys per second of each engine, by operation.",
                "ops",
                counted("vllm:mooncake_store_operation_keys_total", "process", "operation"),
                counted("vllm:mooncake_store_operation_failed_keys_total", "process", "operation", named="failed"),
            ),
        ),
    ),
)
