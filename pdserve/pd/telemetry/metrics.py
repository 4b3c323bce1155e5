"""Count what /metrics of the proxy shows: plain numbers, counted where things happen.

Counting must cost nothing next to a request: a histogram is a list of ints and a bisection, a counter a dictionary of
label values. With several processes each gives its `snapshot`, and the one that is asked adds them up (metrics_page).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence

import msgspec

from pdserve.pd.telemetry.metrics_page import COUNTERS, STAGES, Labels, Snapshot, merge, render

GaugeReader = Callable[[], Iterable[tuple[str, Labels, float]]]
"""Gives (name, label values, value) when the page is asked for."""
CounterReader = Callable[[], Iterable[tuple[str, Labels, int]]]
"""The same for what other objects count: it must never become less."""


class Histogram:
    """Counts by upper bound; the last count is for what is beyond all of them."""

    __slots__ = ("_above", "_place", "_upto", "bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0
        self._place = 0
        self._above, self._upto = -math.inf, self.bounds[0]
        """The bounds of the last count: the next figure is mostly one of it too, and to look at two numbers takes a
        tenth of a search."""

    def observe(self, seconds: float) -> None:
        if not self._above < seconds <= self._upto:
            place = self._place = bisect_left(self.bounds, seconds)
            self._above = self.bounds[place - 1] if place else -math.inf
            self._upto = self.bounds[place] if place < len(self.bounds) else math.inf
        self.counts[self._place] += 1
        self.total += seconds

    def timed(self, seconds: float) -> float:
        """Observe a time, and return it as the log has it: milliseconds to two digits behind the point, never
        negative."""
        self.observe(seconds)
        # round() takes five times as long.
        return int(seconds * 100_000 + 0.5) / 100 if seconds > 0 else 0.0


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
        """Add to a counter. Raises KeyError when there is no such counter."""
        series = self._counters[name]
        series[labels] = series.get(labels, 0) + amount

    def read_gauges_from(self, reader: GaugeReader) -> None:
        """Ask `reader` whenever the page is made."""
        self._readers.append(reader)

    def read_counters_from(self, reader: CounterReader) -> None:
        """Ask `reader` whenever the page is made."""
        self._counter_readers.append(reader)

    def snapshot(self) -> bytes:
        """Return the numbers for `page` in another process."""
        return msgspec.msgpack.encode(self._numbers())

    def page(self, others: Iterable[bytes] = (), *, keys: bool = False) -> bytes:
        """Return the text for Prometheus, with the snapshots of other processes added. `keys`: also what names API
        keys, which is not for every client. msgspec.MsgspecError: one of the snapshots is none."""
        decoded = [msgspec.msgpack.decode(encoded, type=Snapshot) for encoded in others]
        return render(merge([self._numbers(), *decoded]), keys=keys)

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
