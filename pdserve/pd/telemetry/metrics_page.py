"""The page that Prometheus reads: its names and helps, and the numbers of all processes as one.

Not compiled (see hatch_build.py): it is made every few seconds, and msgspec reads the annotations of Snapshot.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

Labels = tuple[str, ...]

PREFIX = "pdserve_proxy_"
_KEY = "key"
"""The label of series that name API keys."""

Stage = Literal["queue", "prefill", "kv_transfer", "ttft", "itl", "e2e"]
_SLOW = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_FAST = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5, 5, 10)
STAGES: Mapping[Stage, tuple[str, Sequence[float]]] = {
    "queue": ("Waiting for a place in the pools.", _SLOW),
    "prefill": ("From sending the prefill leg to its answer.", _SLOW),
    "kv_transfer": ("From prefill's answer to decode's first byte: an upper bound of the KV transfer.", _SLOW),
    "ttft": ("From the request's last byte to the first byte of the answer's content.", _SLOW),
    "itl": ("Between two chunks of a stream.", _FAST),
    "e2e": ("From the request's first byte to the answer's last.", _SLOW),
}

COUNTERS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "requests": ("Requests answered.", ("path", "status")),
    "errors": ("Requests that ended with an error, by who is to blame: client, limit, worker, proxy.", ("blame",)),
    "stream_errors": ("Streams that ended with an error event.", ("worker",)),
    "legs": ("Requests to workers, by how they ended.", ("role", "worker", "outcome")),
    "routing_decisions": ("Choices of a worker.", ("role", "policy", "why")),
    "disagg_decisions": ("Requests by the way they took and why.", ("decision", "why")),
    "failovers": ("Attempts that were made once more on another worker.", ("role", "reason")),
    "cancellations": ("Clients that left, by the stage they left in.", ("stage",)),
    "admission_rejections": ("429 of a pool's gate.", ("pool", "reason")),
    "held_requests_ended": (
        "Requests that have waited for an engine of a role, by how that ended: answered, late (503), left, stopped.",
        ("role", "how"),
    ),
    "quota_rejections": ("429 of a key's limits.", (_KEY, "limit")),
    "unauthorized": ("Requests without a valid key.", ()),
    "prompt_tokens": ("Prompt tokens, as engines reported them.", ()),
    "cached_prompt_tokens": ("Prompt tokens that prefill had in a cache.", ()),
    "completion_tokens": ("Answer tokens, as engines reported them.", ()),
}
"""Name (without prefix and _total) -> help, labels. Label values are fixed words or names of the deployment's own; none
comes from a client."""

GAUGES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "in_flight": ("Legs in flight at a worker.", ("role", "worker")),
    "prompt_tokens_in_flight": ("Estimated tokens of prompts that a worker has not prefilled yet.", ("role", "worker")),
    "kv_usage_ratio": ("KV cache use of a worker, as last read.", ("role", "worker")),
    "worker_ready": ("1: requests are sent to it.", ("role", "worker")),
    "breaker_open": ("1: the worker's breaker is open.", ("role", "worker")),
    "queue_depth": ("Requests waiting for a place in a pool.", ("pool",)),
    "pool_requests": ("Requests in a pool.", ("pool",)),
    "held_requests": ("Requests that wait because no engine of a role is ready.", ("role",)),
    "held_oldest_seconds": ("How long the first of them has waited.", ("role",)),
    "key_requests": ("Requests in flight of a key.", (_KEY,)),
    "connections": ("Open client connections.", ()),
    "draining": ("1: shutting down.", ()),
}
SHARED_GAUGES = frozenset(GAUGES) - {"queue_depth", "held_requests", "connections"}
"""Gauges of which the largest of several processes counts, not the sum: every process reads them from the same place,
or they are ages."""


class Snapshot(msgspec.Struct):
    """Holds all numbers of one process."""

    histograms: dict[str, tuple[list[int], float]]
    counters: dict[str, list[tuple[Labels, int]]]
    gauges: list[tuple[str, Labels, float]]


def render(numbers: Snapshot, *, keys: bool) -> bytes:
    """Return the text for Prometheus. `keys`: with the series that name API keys."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Page(numbers, keys=keys))
    return generate_latest(registry)


def merge(snapshots: Sequence[Snapshot]) -> Snapshot:
    """Return the numbers of several processes as those of one."""
    histograms: dict[str, tuple[list[int], float]] = {}
    counters: dict[str, dict[Labels, int]] = {}
    gauges: dict[tuple[str, Labels], float] = {}
    for snapshot in snapshots:
        for stage, (counts, total) in snapshot.histograms.items():
            so_far, sum_so_far = histograms.get(stage, ([0] * len(counts), 0.0))
            histograms[stage] = ([a + b for a, b in zip(so_far, counts, strict=True)], sum_so_far + total)
        for name, series in snapshot.counters.items():
            into = counters.setdefault(name, {})
            for labels, value in series:
                into[labels] = into.get(labels, 0) + value
        for name, labels, number in snapshot.gauges:
            known = gauges.get((name, labels))
            if known is None:
                gauges[name, labels] = number
            else:
                gauges[name, labels] = max(known, number) if name in SHARED_GAUGES else known + number
    return Snapshot(
        histograms=histograms,
        counters={name: list(series.items()) for name, series in counters.items()},
        gauges=[(name, labels, number) for (name, labels), number in gauges.items()],
    )


class _Page(Collector):
    def __init__(self, numbers: Snapshot, *, keys: bool) -> None:
        self._numbers = numbers
        self._keys = keys

    def collect(self) -> Iterator[Metric]:
        for stage, (about, bounds) in STAGES.items():
            counts, total = self._numbers.histograms[stage]
            histogram = HistogramMetricFamily(f"{PREFIX}{stage}_seconds", about)
            histogram.add_metric([], buckets=_cumulative(bounds, counts), sum_value=total)
            yield histogram
        for name, (about, labels) in COUNTERS.items():
            counter = CounterMetricFamily(PREFIX + name, about, labels=labels)
            series = self._numbers.counters.get(name, []) if self._shows(labels) else []
            # A counter without labels is there from the start, so that its first increase is seen as one.
            for values, count in series or ([] if labels else [((), 0)]):
                counter.add_metric(values, count)
            yield counter
        for name, (about, labels) in GAUGES.items():
            gauge = GaugeMetricFamily(PREFIX + name, about, labels=labels)
            for other, values, number in self._numbers.gauges:
                if other == name and self._shows(labels):
                    gauge.add_metric(values, number)
            yield gauge

    def _shows(self, labels: Labels) -> bool:
        return self._keys or _KEY not in labels


def _cumulative(bounds: Sequence[float], counts: Sequence[int]) -> list[tuple[str, float]]:
    buckets: list[tuple[str, float]] = []
    running = 0
    for bound, count in zip([*map(str, map(float, bounds)), "+Inf"], counts, strict=True):
        running += count
        buckets.append((bound, running))
    return buckets
