"""What counters and histograms of /metrics have added within the last minute. Pure: the caller brings pages and times.

A counter begins again when its process does. A reading in which any has gone down is therefore the first one of a new
life, and those before it do not count.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from prometheus_client.samples import Sample

from pdserve.observe.engine_metrics import Page

SECONDS = 60.0
_ADDS_UP = ("_total", "_bucket", "_sum", "_count")
_Series = tuple[str, frozenset[tuple[str, str]]]


@dataclass(frozen=True)
class _Sample:
    at: float
    counts: Mapping[_Series, float]


@dataclass(frozen=True)
class Distribution:
    """Observations by upper bound: cumulative, the last one without a bound."""

    buckets: tuple[tuple[float, float], ...]

    @property
    def count(self) -> float:
        return self.buckets[-1][1] if self.buckets else 0.0

    @property
    def largest_bound(self) -> float:
        """What no estimate exceeds; 0 without buckets."""
        return self.buckets[-2][0] if len(self.buckets) > 1 else 0.0

    def quantile(self, share: float) -> float | None:
        """As Prometheus estimates it: even within a bucket, and the largest bound for what is beyond it. None without
        observations."""
        wanted, below, low = share * self.count, 0.0, 0.0
        if not self.count:
            return None
        for bound, upto in self.buckets:
            if upto >= wanted and upto > below:
                if math.isinf(bound):
                    return low
                share_of_bucket = (wanted - below) / (upto - below)
                return min(bound, low + (bound - low) * share_of_bucket)  # a sum of floats may be a bit above it
            low, below = bound, upto
        return None


class MetricsWindow:
    """The readings of all processes within the last `seconds`."""

    def __init__(self, seconds: float = SECONDS) -> None:
        self._seconds = seconds
        self._readings: dict[str, deque[_Sample]] = {}

    def add(self, at: float, pages: Mapping[str, Page]) -> None:
        """One look at all processes, at a time that only grows. What did not answer is forgotten."""
        for gone in self._readings.keys() - {name for name, page in pages.items() if not isinstance(page, str)}:
            del self._readings[gone]
        for name, page in pages.items():
            if not isinstance(page, str):
                self._add(at, self._readings.setdefault(name, deque()), page)

    def _add(self, at: float, readings: deque[_Sample], samples: Iterable[Sample]) -> None:
        counts = {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for sample in samples
            if sample.name.endswith(_ADDS_UP)
        }
        if readings and any(counts.get(series, 0.0) < value for series, value in readings[-1].counts.items()):
            readings.clear()
        readings.append(_Sample(at, counts))
        while len(readings) > 2 and readings[1].at <= at - self._seconds:
            readings.popleft()

    def seconds(self, process: str) -> float:
        """What lies between its first and last reading; 0 with fewer than two."""
        readings = self._readings.get(process)
        return 0.0 if readings is None else readings[-1].at - readings[0].at

    def increase(self, process: str, name: str, **labels: str) -> float | None:
        """What all series of that name and these labels have added. None: there is no such series, or only one
        reading."""
        if not self.seconds(process):
            return None
        first, last = self._readings[process][0].counts, self._readings[process][-1].counts
        wanted = labels.items()
        added = [
            value - first.get(series, 0.0)
            for series, value in last.items()
            if series[0] == name and wanted <= dict(series[1]).items()
        ]
        return sum(added) if added else None

    def rate(self, process: str, name: str, **labels: str) -> float | None:
        """The same a second."""
        added = self.increase(process, name, **labels)
        return None if added is None else added / self.seconds(process)

    def distribution(self, processes: Iterable[str], name: str) -> Distribution | None:
        """The observations of a histogram, of all these processes together. None: none of them has it."""
        by_bound: dict[float, float] = {}
        for process in processes:
            if not self.seconds(process):
                continue
            first, last = self._readings[process][0].counts, self._readings[process][-1].counts
            for series, value in last.items():
                if series[0] == f"{name}_bucket":
                    bound = float(dict(series[1])["le"])
                    by_bound[bound] = by_bound.get(bound, 0.0) + value - first.get(series, 0.0)
        return Distribution(tuple(sorted(by_bound.items()))) if by_bound else None
