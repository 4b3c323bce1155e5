"""What /metrics of the proxy shows: plain numbers that are counted where things happen, and their rendering.

Counting must cost nothing next to a request: a histogram is a list of ints and a bisection, a counter a dictionary of
label values. prometheus_client only writes the page. With several processes each gives its `snapshot`, and the one
that is asked adds them up.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Literal

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

PREFIX = "pdserve_proxy_"

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
    "failovers": ("Attempts that were made once more elsewhere.", ("role", "reason")),
    "cancellations": ("Clients that left, by the stage they left in.", ("stage",)),
    "admission_rejections": ("429 of a pool's gate.", ("pool", "reason")),
    "quota_rejections": ("429 of a key's limits.", ("key", "limit")),
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
    "breaker_open": ("1: left alone after failures.", ("role", "worker")),
    "queue_depth": ("Requests waiting for a place in a pool.", ("pool",)),
    "pool_requests": ("Requests in a pool.", ("pool",)),
    "key_requests": ("Requests in flight of a key.", ("key",)),
    "connections": ("Open client connections.", ()),
    "draining": ("1: shutting down.", ()),
}
SHARED_GAUGES = frozenset(GAUGES) - {"queue_depth", "connections"}
"""Gauges that every process reads from the same place: of several processes the largest counts, not the sum."""

Labels = tuple[str, ...]
GaugeReader = Callable[[], Iterable[tuple[str, Labels, float]]]
"""Gives (name, label values, value) when the page is asked for."""
CounterReader = Callable[[], Iterable[tuple[str, Labels, int]]]
"""The same for what is counted elsewhere: it must never become less."""


class Histogram:
    """Counts by upper bound; the last count is for what is beyond all of them."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(self.bounds, seconds)] += 1
        self.total += seconds

    def timed(self, seconds: float) -> float:
        """`observe`, and the same as the log says it: milliseconds to two digits behind the point, never negative."""
        self.counts[bisect_left(self.bounds, seconds)] += 1
        self.total += seconds
        # round() takes five times as long.
        return int(seconds * 100_000 + 0.5) / 100 if seconds > 0 else 0.0


class Snapshot(msgspec.Struct):
    """All numbers of one process."""

    histograms: dict[str, tuple[list[int], float]]
    counters: dict[str, list[tuple[Labels, int]]]
    gauges: list[tuple[str, Labels, float]]


class Metrics:
    """The numbers of one process. Histograms are attributes: `metrics.ttft.observe(0.2)`."""

    def __init__(self) -> None:
        self.queue = Histogram(STAGES["queue"][1])
        self.prefill = Histogram(STAGES["prefill"][1])
        self.kv_transfer = Histogram(STAGES["kv_transfer"][1])
        self.ttft = Histogram(STAGES["ttft"][1])
        self.itl = Histogram(STAGES["itl"][1])
        self.e2e = Histogram(STAGES["e2e"][1])
        self._counters: dict[str, dict[Labels, int]] = {name: {} for name in COUNTERS}
        self._readers: list[GaugeReader] = []
        self._counter_readers: list[CounterReader] = []

    def count(self, name: str, labels: Labels = (), amount: int = 1) -> None:
        """Add to a counter. KeyError: there is no such counter."""
        series = self._counters[name]
        series[labels] = series.get(labels, 0) + amount

    def read_gauges_from(self, reader: GaugeReader) -> None:
        """Ask `reader` whenever the page is made."""
        self._readers.append(reader)

    def read_counters_from(self, reader: CounterReader) -> None:
        """Ask `reader` whenever the page is made."""
        self._counter_readers.append(reader)

    def snapshot(self) -> bytes:
        """For `page` in another process."""
        return msgspec.msgpack.encode(self._numbers())

    def page(self, others: Iterable[bytes] = ()) -> bytes:
        """The text for Prometheus, with the snapshots of other processes added. msgspec.MsgspecError: one of them is
        none."""
        merged = merge([self._numbers(), *(msgspec.msgpack.decode(one, type=Snapshot) for one in others)])
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Page(merged))
        return generate_latest(registry)

    def _numbers(self) -> Snapshot:
        histograms: dict[str, tuple[list[int], float]] = {}
        for stage in STAGES:
            histogram: Histogram = getattr(self, stage)
            histograms[stage] = (list(histogram.counts), histogram.total)
        counters = {name: list(series.items()) for name, series in self._counters.items()}
        for counter_reader in self._counter_readers:
            for name, labels, value in counter_reader():
                counters[name].append((labels, value))
        return Snapshot(
            histograms=histograms,
            counters=counters,
            gauges=[gauge for reader in self._readers for gauge in reader()],
        )


def merge(snapshots: Sequence[Snapshot]) -> Snapshot:
    """The numbers of several processes as those of one."""
    histograms: dict[str, tuple[list[int], float]] = {}
    counters: dict[str, dict[Labels, int]] = {}
    gauges: dict[tuple[str, Labels], float] = {}
    for one in snapshots:
        for stage, (counts, total) in one.histograms.items():
            so_far, sum_so_far = histograms.get(stage, ([0] * len(counts), 0.0))
            histograms[stage] = ([a + b for a, b in zip(so_far, counts, strict=True)], sum_so_far + total)
        for name, series in one.counters.items():
            into = counters.setdefault(name, {})
            for labels, value in series:
                into[labels] = into.get(labels, 0) + value
        for name, labels, number in one.gauges:
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
    def __init__(self, numbers: Snapshot) -> None:
        self._numbers = numbers

    def collect(self) -> Iterator[Metric]:
        for stage, (about, bounds) in STAGES.items():
            counts, total = self._numbers.histograms[stage]
            histogram = HistogramMetricFamily(f"{PREFIX}{stage}_seconds", about)
            histogram.add_metric([], buckets=_cumulative(bounds, counts), sum_value=total)
            yield histogram
        for name, (about, labels) in COUNTERS.items():
            counter = CounterMetricFamily(PREFIX + name, about, labels=labels)
            series = self._numbers.counters.get(name, [])
            # A counter without labels is there from the start, so that its first increase is seen as one.
            for values, count in series or ([] if labels else [((), 0)]):
                counter.add_metric(values, count)
            yield counter
        for name, (about, labels) in GAUGES.items():
            gauge = GaugeMetricFamily(PREFIX + name, about, labels=labels)
            for other, values, number in self._numbers.gauges:
                if other == name:
                    gauge.add_metric(values, number)
            yield gauge


def _cumulative(bounds: Sequence[float], counts: Sequence[int]) -> list[tuple[str, float]]:
    found: list[tuple[str, float]] = []
    running = 0
    for bound, count in zip([*map(str, map(float, bounds)), "+Inf"], counts, strict=True):
        running += count
        found.append((bound, running))
    return found
