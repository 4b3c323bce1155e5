"""Queries, hits and misses of MultiConnector's children, on the API server's /metrics.

The counts are made by the scheduler and travel as one more member of upstream's MultiKVConnectorStats, as a child's
own statistics do: msgpack between the processes (nested below `data` before vllm 0.30, flat since), observed in the
API server for the DP rank that they came from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client import Counter, Gauge
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from pdserve.connectors.selection import ChildAnswer

MEMBER = "selection"
"""Key among the statistics of the children, which have class names."""

_COUNTERS = {
    "queries": "Requests that were scheduled after this child of MultiConnector had been asked for their KV.",
    "hits": "Requests whose KV this child of MultiConnector was chosen to load.",
    "hit_tokens": "Tokens that this child of MultiConnector was chosen to load.",
    "misses": "Requests of which this child of MultiConnector had no KV; other queries that hit nothing were outbid.",
}
_PENDING = "pending_loads"


@dataclass
class SelectionStats(KVConnectorStats):  # type: ignore[misc]  # vllm is not there when types are checked
    """`data`: counter -> child -> increment since the last report, and pending_loads -> child -> level."""

    def aggregate(self, other: SelectionStats) -> SelectionStats:
        for name, values in other.data.items():
            mine = self.data.setdefault(name, {})
            for child, value in values.items():
                mine[child] = value if name == _PENDING else mine.get(child, 0) + value
        return self

    def reduce(self) -> dict[str, Any]:
        return {name: dict(values) for name, values in self.data.items() if values}

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def is_empty(self) -> bool:
        return not any(self.data.values())


class SelectionCounts:
    """The scheduler's side: counts requests when they are scheduled, so that polling again counts nothing."""

    def __init__(self, children: Sequence[str]) -> None:
        self._children = children
        # Lists, by place: they are counted in for each request, and a Counter costs ten times as much.
        self._counts: dict[str, list[int]] = {name: [0] * len(children) for name in _COUNTERS}
        self._changed = False
        self._loading: dict[str, int] = {}
        self._reported: dict[str, int] = dict.fromkeys(children, 0)

    def scheduled(self, request_id: str, answers: Sequence[ChildAnswer], winner: int | None, tokens: int) -> None:
        """`tokens`: what the scheduler really lets the winner load."""
        self._changed = True
        queries, misses = self._counts["queries"], self._counts["misses"]
        for index, (matched, _) in enumerate(answers):
            queries[index] += 1
            if matched == 0:
                misses[index] += 1
        if winner is not None and tokens > 0:
            self._counts["hits"][winner] += 1
            self._counts["hit_tokens"][winner] += tokens
            if answers[winner].load_async:
                self._loading[request_id] = winner

    def settled(self, request_id: str) -> None:
        """The load of the request, or the request, has ended: nothing waits for the load any more."""
        self._loading.pop(request_id, None)

    def take(self) -> SelectionStats | None:
        """What has changed since the last call."""
        data: dict[str, dict[str, int]] = {}
        if self._changed:
            for name, counts in self._counts.items():
                if any(counts):
                    data[name] = {child: n for child, n in zip(self._children, counts, strict=True) if n}
                    self._counts[name] = [0] * len(counts)
            self._changed = False
        now = dict.fromkeys(self._children, 0)
        for index in self._loading.values():
            now[self._children[index]] += 1
        if now != self._reported:
            data[_PENDING] = self._reported = now
        return SelectionStats(data=data) if data else None


def rebuilt(value: Any) -> SelectionStats:
    """From what another process sent, or the object itself."""
    if isinstance(value, SelectionStats):
        return value
    return SelectionStats(data=value.get("data", value))


class SelectionMetrics(KVConnectorPromMetrics):  # type: ignore[misc]  # as above
    """The API server's side: every series exists from the start, at 0, for every DP rank."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Mapping[type, Any],
        labelnames: list[str],
        per_engine_labelvalues: Mapping[int, list[object]],
        children: Sequence[str],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        names = [*labelnames, "connector"]
        families = {
            name: metric_types[Counter](
                name=f"vllm:kv_connector_mc_{name}", documentation=documentation, labelnames=names
            )
            for name, documentation in _COUNTERS.items()
        }
        families[_PENDING] = metric_types[Gauge](
            name=f"vllm:kv_connector_mc_{_PENDING}",
            documentation="Requests that wait for KV which this child of MultiConnector loads right now.",
            multiprocess_mode="mostrecent",
            labelnames=names,
        )
        self._series = {
            (name, engine, child): family.labels(*values, child)
            for name, family in families.items()
            for engine, values in per_engine_labelvalues.items()
            for child in children
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, values in transfer_stats_data.items():
            for child, value in values.items():
                series = self._series[name, engine_idx, child]
                if name == _PENDING:
                    series.set(value)
                else:
                    series.inc(value)
