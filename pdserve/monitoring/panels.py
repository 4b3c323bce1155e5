"""What the dashboard shows, from the client's side down to the caches: rows of panels, as data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from pdserve.monitoring.parts import Part
from pdserve.pd.telemetry.metrics_page import PREFIX

Unit = Literal["s", "percentunit", "reqps", "bytes", "Bps", "short", "ops"]
"""Grafana's ids of units."""

SELECTED = 'deployment=~"$deployment"'
"""The dashboard's variable, in every selector."""
RANGE = "$__rate_interval"
"""Grafana's own choice of a window, from the scrape interval and the zoom."""


@dataclass(frozen=True)
class Query:
    """One line, or one line a label."""

    expr: str
    legend: str


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


def _rate(metric: str, by: str, **labels: str) -> str:
    selectors = ",".join([SELECTED, *(f'{name}="{value}"' for name, value in labels.items())])
    return f"sum by ({by}) (rate({metric}{{{selectors}}}[{RANGE}]))"


def _quantiles(metric: str, by: str = "") -> Iterator[Query]:
    """p50, p90 and p99 of a histogram."""
    groups = f"le, {by}" if by else "le"
    for name, quantile in (("p50", "0.5"), ("p90", "0.9"), ("p99", "0.99")):
        legend = f"{name} {{{{{by}}}}}" if by else name
        yield Query(f"histogram_quantile({quantile}, {_rate(f'{metric}_bucket', groups)})", legend)


def _each(metric: str, by: str, function: str = "sum") -> Query:
    """A gauge, one line a value of the label."""
    return Query(f"{function} by ({by}) ({metric}{{{SELECTED}}})", f"{{{{{by}}}}}")


def _share(part: str, whole: str, by: str) -> Query:
    return Query(f"{_rate(part, by)} / {_rate(whole, by)}", f"{{{{{by}}}}}")


_P = PREFIX
_LATENCIES = (
    Panel(
        "Time to first token",
        "From the request's last byte to the first byte of the answer's content, as clients see it.",
        "s",
        tuple(_quantiles(f"{_P}ttft_seconds")),
    ),
    Panel(
        "Time between chunks",
        "Between two chunks of a stream, as clients see it: one token each, unless the engine joins some.",
        "s",
        tuple(_quantiles(f"{_P}itl_seconds")),
    ),
    Panel("Whole request", "First byte in to last byte out.", "s", tuple(_quantiles(f"{_P}e2e_seconds"))),
    Panel(
        "Where the time goes (p90)",
        "KV transfer is an upper bound: from prefill's answer to decode's first byte.",
        "s",
        tuple(
            Query(f"histogram_quantile(0.9, {_rate(f'{_P}{stage}_seconds_bucket', 'le')})", stage)
            for stage in ("queue", "prefill", "kv_transfer", "ttft")
        ),
    ),
)

ROWS: tuple[PanelRow, ...] = (
    PanelRow(
        "Clients",
        "proxy",
        (
            Panel(
                "Requests",
                "Answered requests by status.",
                "reqps",
                (Query(_rate(f"{_P}requests_total", "status"), "{{status}}"),),
                stacked=True,
            ),
            Panel(
                "Errors",
                "By who is to blame: client, limit, worker, proxy. And streams that ended with an error.",
                "reqps",
                (
                    Query(_rate(f"{_P}errors_total", "blame"), "{{blame}}"),
                    Query(_rate(f"{_P}stream_errors_total", "worker"), "stream of {{worker}}"),
                ),
            ),
            *_LATENCIES,
            Panel(
                "Tokens of answers with usage",
                "Per second. A stream has usage only if its client asked. Cached: prompt tokens that prefill had.",
                "short",
                tuple(
                    Query(_rate(f"{_P}{name}_total", "deployment"), name.replace("_", " "))
                    for name in ("prompt_tokens", "cached_prompt_tokens", "completion_tokens")
                ),
            ),
            Panel(
                "Waiting at the proxy",
                "Requests that wait for a place in a pool, and 429 when there is none.",
                "short",
                (
                    _each(f"{_P}queue_depth", "pool"),
                    Query(_rate(f"{_P}admission_rejections_total", "pool, reason"), "429/s {{pool}} {{reason}}"),
                ),
            ),
            Panel("In flight", "Legs at each worker.", "short", (_each(f"{_P}in_flight", "worker"),), stacked=True),
            Panel(
                "Workers that get requests",
                "1: requests are sent to it. 0: dead, not answering, draining, or its breaker is open.",
                "short",
                (_each(f"{_P}worker_ready", "worker", "min"),),
            ),
            Panel(
                "Second attempts and clients that left",
                "Failovers to another worker by reason; cancellations by the stage that the client left in.",
                "ops",
                (
                    Query(_rate(f"{_P}failovers_total", "role, reason"), "failover {{role}} {{reason}}"),
                    Query(_rate(f"{_P}cancellations_total", "stage"), "left in {{stage}}"),
                ),
            ),
        ),
    ),
    PanelRow(
        "Engines",
        "engines",
        (
            Panel("Running", "Requests in the batch.", "short", (_each("vllm:num_requests_running", "process"),)),
            Panel("Waiting", "Requests in its queue.", "short", (_each("vllm:num_requests_waiting", "process"),)),
            Panel(
                "KV cache in use",
                "Of the fullest data-parallel rank. An idle engine repeats its last value.",
                "percentunit",
                (_each("vllm:kv_cache_usage_perc", "process", "max"),),
            ),
            Panel(
                "Prompt tokens by source",
                "computed here, hit in its own prefix cache, or received (on decode from prefill, on prefill from a "
                "cache). A decode that computes prompts has lost its transfers.",
                "short",
                (Query(_rate("vllm:prompt_tokens_by_source_total", "process, source"), "{{process}} {{source}}"),),
                stacked=True,
            ),
            Panel(
                "Prefix cache hits",
                "Share of the prompt tokens that its own cache had.",
                "percentunit",
                (_share("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total", "process"),),
            ),
            Panel(
                "External hits",
                "Share of the looked-up tokens that a connector can load. About 100 % on decode is disaggregation.",
                "percentunit",
                (
                    _share(
                        "vllm:external_prefix_cache_hits_total", "vllm:external_prefix_cache_queries_total", "process"
                    ),
                ),
            ),
            Panel(
                "Generated tokens",
                "Per second.",
                "short",
                (Query(_rate("vllm:generation_tokens_total", "process"), "{{process}}"),),
                stacked=True,
            ),
            Panel(
                "Queue time (p50, p90, p99)",
                "In the engine, before it is scheduled.",
                "s",
                tuple(_quantiles("vllm:request_queue_time_seconds", "role")),
            ),
            Panel(
                "Time between tokens (p50, p90, p99)",
                "As the engine sees it.",
                "s",
                tuple(_quantiles("vllm:inter_token_latency_seconds", "role")),
            ),
            Panel(
                "Preemptions",
                "Requests whose KV was dropped for want of room.",
                "ops",
                (Query(_rate("vllm:num_preemptions_total", "process"), "{{process}}"),),
            ),
        ),
    ),
    PanelRow(
        "KV transfer: Mooncake",
        "mooncake",
        (
            Panel(
                "What the patches counted",
                "Pulls that failed, prefills that were gone, transfers withdrawn, sockets that were lacking.",
                "ops",
                (
                    Query(
                        f"sum by (process, patch, effect) (rate(pdserve_patch_effects_total{{{SELECTED},"
                        f'patch=~"mooncake-.*"}}[{RANGE}]))',
                        "{{process}} {{effect}}",
                    ),
                ),
            ),
        ),
    ),
    PanelRow(
        "KV transfer: NIXL",
        "nixl",
        (
            Panel(
                "Bytes",
                "Per second, received.",
                "Bps",
                (Query(_rate("vllm:nixl_bytes_transferred_sum", "process"), "{{process}}"),),
                stacked=True,
            ),
            Panel("Duration", "Of one transfer.", "s", tuple(_quantiles("vllm:nixl_xfer_time_seconds"))),
            Panel(
                "Failures",
                "Failed transfers, and KV that no decode fetched in time.",
                "ops",
                (
                    Query(_rate("vllm:nixl_num_failed_transfers_total", "process"), "failed {{process}}"),
                    Query(_rate("vllm:nixl_num_kv_expired_reqs_total", "process"), "expired {{process}}"),
                ),
            ),
        ),
    ),
    PanelRow(
        "LMCache",
        "lmcache",
        (
            Panel("L1 in use", "Share of its memory.", "percentunit", (_each("lmcache_mp_l1_usage_ratio", "process"),)),
            Panel(
                "Hits",
                "Share of the looked-up tokens that it has.",
                "percentunit",
                (_share("lmcache_mp_lookup_hit_tokens_total", "lmcache_mp_lookup_requested_tokens_total", "process"),),
            ),
            Panel(
                "Chunks",
                "Per second: stored, read, evicted.",
                "ops",
                tuple(
                    Query(_rate(f"lmcache_mp_l1_{what}_chunks_total", "process"), f"{what} {{{{process}}}}")
                    for what in ("write", "read", "evicted")
                ),
            ),
            Panel(
                "Failures",
                "Chunks without room, chunks that were gone when they were read, and timeouts.",
                "ops",
                (
                    Query(_rate("lmcache_mp_l1_allocation_failure_chunks_total", "process"), "no room {{process}}"),
                    Query(_rate("lmcache_mp_l1_read_failure_chunks_total", "process"), "not readable {{process}}"),
                    Query(_rate("lmcache_mp_timeouts_total", "process"), "timeouts {{process}}"),
                ),
            ),
        ),
    ),
    PanelRow(
        "Mooncake store",
        "mooncake-store",
        (
            Panel(
                "Pool in use",
                "Bytes of its capacity.",
                "bytes",
                (
                    Query(f"sum(master_allocated_bytes{{{SELECTED}}})", "used"),
                    Query(f"sum(master_total_capacity_bytes{{{SELECTED}}})", "capacity"),
                ),
            ),
            Panel("Keys", "In the pool.", "short", (_each("master_key_count", "process"),)),
            Panel(
                "Operations",
                "Keys per second of each engine, by operation.",
                "ops",
                (
                    Query(
                        _rate("vllm:mooncake_store_operation_keys_total", "process, operation"),
                        "{{process}} {{operation}}",
                    ),
                    Query(
                        _rate("vllm:mooncake_store_operation_failed_keys_total", "process, operation"),
                        "failed {{process}} {{operation}}",
                    ),
                ),
            ),
        ),
    ),
)
