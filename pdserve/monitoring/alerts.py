"""Prometheus' alert rules of a deployment.

An alert is for what a person has to act on, and says what to do. The thresholds are starting points: they know neither
the hardware nor what clients were promised, so there is none on latency.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal

import yaml

from pdserve.monitoring.parts import Part

_SHARE_OF_COMPUTED = """
sum by (deployment, process) (rate(vllm:prompt_tokens_by_source_total{role="decode",source="local_compute"}[10m]))
/ sum by (deployment, process) (rate(vllm:prompt_tokens_by_source_total{role="decode"}[10m])) > 0.2
"""
_FAILED_SHARE = """
sum by (deployment) (rate(pdserve_proxy_errors_total{blame=~"worker|proxy"}[5m]))
/ sum by (deployment) (rate(pdserve_proxy_requests_total[5m])) > 0.01
"""


def _counted(by: str, metric: str, where: str = "") -> str:
    """Whether a counter has grown in five minutes. A series that appears with its first event has no increase(): it is
    what was not there five minutes ago, although its process was read then. A Prometheus that has just begun has not
    read it, and takes no count of last week for an event."""
    series = f"{metric}{where}"
    appeared = f"({series} unless {series} offset 5m) and on (deployment, process) (up offset 5m == 1)"
    return f"sum by ({by}) (increase({series}[5m])) > 0 or sum by ({by}) ({appeared}) > 0"


def _grown(metric: str) -> str:
    """By how much the counters of a process have grown in an hour. Each cache_salt has a series of its own: one that
    was not there an hour ago has grown by all of its value. As in `_counted`, the process was read then."""
    appeared = f"({metric} unless {metric} offset 1h) and on (deployment, process) (up offset 1h == 1)"
    return f"sum by (deployment, process) (({appeared}) or increase({metric}[1h]))"


_NEVER_HIT = f"""
{_grown("lmcache_mp_l1_evicted_chunks_total")} > 0
and {_grown("lmcache_mp_lookup_hit_tokens_total")}
< 0.01 * {_grown("lmcache_mp_lookup_requested_tokens_total")}
"""
_MOONCAKE_FAILS = " or ".join(
    _counted("deployment, process", metric, where)
    for metric, where in (
        ("pdserve_patch_effects_total", '{patch="mooncake-pulls",effect=~"pulls-failed|peers-lost"}'),
        # Of prefill and of decode; before vllm 0.33 with the patch mooncake-prom-metrics.
        ("vllm:mooncake_num_failed_transfers_total", ""),
        ("vllm:mooncake_num_failed_recvs_total", ""),
    )
)


@dataclass(frozen=True)
class Alert:
    """One rule. Summary and fix may have Prometheus' `{{ $labels.NAME }}` and `{{ $value }}`."""

    name: str
    part: Part
    """The part of the deployment without which there is no such alert."""
    expr: str
    lasts: str
    """How long it must hold."""
    severity: Literal["critical", "warning"]
    summary: str
    fix: str


_PROCESS = "{{ $labels.process }} of {{ $labels.deployment }}"
_WORKER = "{{ $labels.worker }} of {{ $labels.deployment }}"
_LOGS = "pdserve logs {{ $labels.process }} --deployment {{ $labels.deployment }}"

ALERTS: tuple[Alert, ...] = (
    Alert(
        "PdserveProcessDown",
        "engines",
        'up{deployment!=""} == 0',
        "1m",
        "critical",
        f"{_PROCESS} does not answer on /metrics.",
        "pdserve status {{ $labels.deployment }} shows whether it lives and why not. "
        f"If it does: {_LOGS}. After an `up` with other ports or nodes, run pdserve monitoring again.",
    ),
    Alert(
        "PdserveRoleGone",
        "proxy",
        "sum by (deployment, role) (pdserve_proxy_worker_ready) == 0",
        "30s",
        "critical",
        "{{ $labels.deployment }} has no ready {{ $labels.role }} engine: clients get 503.",
        "pdserve status {{ $labels.deployment }} names what died; pdserve restart PROCESS starts it again.",
    ),
    Alert(
        "PdserveWorkerNotReady",
        "proxy",
        "pdserve_proxy_worker_ready == 0",
        "5m",
        "warning",
        f"{_WORKER} gets no requests.",
        "pdserve status {{ $labels.deployment }} has the reason; pdserve restart {{ $labels.worker }} "
        "--deployment {{ $labels.deployment }} starts it again.",
    ),
    Alert(
        "PdserveBreakerOpen",
        "proxy",
        "pdserve_proxy_breaker_open == 1",
        "1m",
        "warning",
        f"{_WORKER} fails requests: the proxy has opened its breaker.",
        "pdserve logs {{ $labels.worker }} --deployment {{ $labels.deployment }} has the failures.",
    ),
    Alert(
        "PdserveErrors",
        "proxy",
        _FAILED_SHARE,
        "5m",
        "critical",
        "{{ $value | humanizePercentage }} of the requests of {{ $labels.deployment }} fail through engines or proxy.",
        "pdserve logs proxy --deployment {{ $labels.deployment }} has one line a request, with the engine to blame.",
    ),
    Alert(
        "PdserveStreamErrors",
        "proxy",
        _counted("deployment, worker", "pdserve_proxy_stream_errors_total"),
        "0s",
        "warning",
        f"Streams from {_WORKER} ended with an error in the last five minutes.",
        "pdserve logs {{ $labels.worker }} --deployment {{ $labels.deployment }} has the failures.",
    ),
    Alert(
        "PdserveRequestsRefused",
        "proxy",
        "sum by (deployment, pool) (rate(pdserve_proxy_admission_rejections_total[5m])) > 0",
        "5m",
        "warning",
        "The pool {{ $labels.pool }} of {{ $labels.deployment }} is full: clients get 429.",
        "Add instances to that role, or raise proxy.admission if the engines still have room (KV use, waiting).",
    ),
    Alert(
        "PdserveQueueGrows",
        "proxy",
        "min_over_time(pdserve_proxy_queue_depth[5m]) > 0",
        "5m",
        "warning",
        "Requests have waited for a place in the pool {{ $labels.pool }} of {{ $labels.deployment }} without a break.",
        "Add instances to that role, or raise proxy.admission if the engines still have room (KV use, waiting).",
    ),
    Alert(
        "VllmKvCacheFull",
        "engines",
        "vllm:kv_cache_usage_perc > 0.95",
        "10m",
        "warning",
        f"The KV cache of {_PROCESS} is {{{{ $value | humanizePercentage }}}} full.",
        "Add instances to that role, raise gpu-memory-utilization, or lower max-num-seqs in its args.",
    ),
    Alert(
        "VllmPreempts",
        "engines",
        "sum by (deployment, process) (increase(vllm:num_preemptions_total[10m])) > 10",
        "5m",
        "warning",
        f"{_PROCESS} preempts requests: their KV is dropped and computed again.",
        "Lower max-num-seqs in its args, raise gpu-memory-utilization, or add instances to that role.",
    ),
    Alert(
        "VllmDecodeComputesPrompts",
        "disaggregated",
        _SHARE_OF_COMPUTED,
        "10m",
        "critical",
        f"{_PROCESS} computes {{{{ $value | humanizePercentage }}}} of its prompt tokens itself.",
        "KV transfers fail, or routing sends prompts past prefill (conditional routing does so on purpose). "
        "pdserve verify {{ $labels.deployment }} proves which; pdserve status {{ $labels.deployment }} has what the "
        "patches counted.",
    ),
    Alert(
        "MooncakePullsFail",
        "mooncake",
        _MOONCAKE_FAILS,
        "0s",
        "critical",
        f"KV transfers to or from {_PROCESS} failed in the last five minutes.",
        f"{_LOGS} names the other engine; look at the network between their nodes.",
    ),
    Alert(
        "EngineOutOfSockets",
        "mooncake",
        _counted("deployment, process", "pdserve_patch_effects_total", '{effect="out-of-sockets"}'),
        "0s",
        "critical",
        f"{_PROCESS} ran out of sockets or file descriptors: requests fail.",
        "pdserve status {{ $labels.deployment }} says which limit to raise.",
    ),
    Alert(
        "NixlTransfersFail",
        "nixl",
        _counted("deployment, process", "vllm:nixl_num_failed_transfers_total"),
        "0s",
        "critical",
        f"KV transfers to {_PROCESS} failed in the last five minutes.",
        f"{_LOGS} names the prefill; look at the network between their nodes.",
    ),
    Alert(
        "NixlKvExpires",
        "nixl",
        _counted("deployment, process", "vllm:nixl_num_kv_expired_reqs_total"),
        "0s",
        "warning",
        f"{_PROCESS} dropped KV that no decode had fetched in time.",
        "Decode is too slow or has failed: look at its waiting requests and at its log.",
    ),
    Alert(
        "LmcacheOutOfMemory",
        "lmcache",
        "sum by (deployment, process) (increase(lmcache_mp_l1_allocation_failure_chunks_total[5m])) > 0",
        "5m",
        "warning",
        f"{_PROCESS} has no room for chunks: what engines store is lost.",
        "Raise lmcache.l1_size_gb.",
    ),
    Alert(
        "LmcacheReadsFail",
        "lmcache",
        "sum by (deployment, process) (increase(lmcache_mp_l1_read_failure_chunks_total[5m])) > 0",
        "5m",
        "warning",
        f"{_PROCESS} lost chunks between a lookup and its read: engines compute them again.",
        f"L1 evicts what is about to be read: raise lmcache.l1_size_gb. {_LOGS} has the reason of each.",
    ),
    Alert(
        "LmcacheNeverHits",
        "lmcache",
        _NEVER_HIT,
        "1h",
        "warning",
        f"{_PROCESS} evicts chunks, and less than 1 % of the tokens that engines look up are in it.",
        "L1 may be smaller than the time between two uses of a prefix: raise lmcache.l1_size_gb, or leave LMCache out.",
    ),
    Alert(
        "MooncakeStoreFails",
        "mooncake-store",
        "sum by (deployment, process) (increase(vllm:mooncake_store_operation_failed_keys_total[5m])) > 0",
        "5m",
        "warning",
        f"{_PROCESS} cannot store or load keys of the Mooncake store.",
        f"{_LOGS} has the reason; pdserve status {{{{ $labels.deployment }}}} shows how full the pool is.",
    ),
)


def alerts_yml(parts: Collection[Part]) -> str:
    """The file of rules for a deployment with these parts."""
    rules = [_rule(alert) for alert in ALERTS if alert.part in parts]
    return yaml.safe_dump({"groups": [{"name": "pdserve", "rules": rules}]}, sort_keys=False, width=120)


def _rule(alert: Alert) -> dict[str, Any]:
    return {
        "alert": alert.name,
        "expr": " ".join(alert.expr.split()),
        "for": alert.lasts,
        "labels": {"severity": alert.severity},
        "annotations": {"summary": alert.summary, "fix": alert.fix},
    }
