"""MultiConnector that chooses the child to load from by tokens x weight, with a limit on the wait for slow lookups.

Patch multiconnector-selection (vllm#38261) has what goes wrong without it and when it can go. The class keeps
upstream's name, because upstream compares names (HMA, has_connector); vLLM loads it through kv_connector_module_path.
Saving to every child, the count of async saves and the groups of hybrid models stay upstream's.

Queries, hits and misses of the children are on the API server's /metrics. The scheduler counts them, and they travel as
one more member of upstream's MultiKVConnectorStats, as a child's own statistics do: msgpack between the processes
(nested below `data` before vllm 0.30, flat since), observed in the API server for the DP rank that they came from.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client import Counter, Gauge
from vllm.distributed.kv_transfer.kv_connector.v1 import multi_connector as upstream
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.request import RequestStatus

from pdserve.connectors.selection import NO_ANSWER, ChildAnswer, decide, labels, load_weight, patience_seconds
from pdserve.connectors.selection_lookups import LookupKeeper, keep_lookups
from pdserve.patches import effects
from pdserve.patches.multiconnector import SELECTION
from pdserve.patches.record import left_out

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
    """Holds what was counted since the last report. `data`: counter -> child -> increment, and pending_loads -> child
    -> level."""

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
    """Counts on the scheduler's side: requests when they are scheduled, so that polling again counts nothing."""

    def __init__(self, children: Sequence[str]) -> None:
        self._children = children
        # Lists, by place: they are counted in for each request, and a Counter costs ten times as much.
        self._counts: dict[str, list[int]] = {name: [0] * len(children) for name in _COUNTERS}
        self._changed = False
        self._loading: dict[str, int] = {}
        self._reported: dict[str, int] = dict.fromkeys(children, 0)

    def scheduled(self, request_id: str, answers: Sequence[ChildAnswer], winner: int | None, tokens: int) -> None:
        """Count a request that is scheduled. `tokens`: what the scheduler really lets the winner load."""
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
        """Forget the load of a request, when the load or the request has ended: nothing waits for it any more."""
        self._loading.pop(request_id, None)

    def take(self) -> SelectionStats | None:
        """Return what has changed since the last call."""
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


def rebuild_stats(value: Any) -> SelectionStats:
    """Return the figures from what another process sent, or the object itself."""
    if isinstance(value, SelectionStats):
        return value
    return SelectionStats(data=value.get("data", value))


class SelectionMetrics(KVConnectorPromMetrics):  # type: ignore[misc]  # as above
    """Shows the counts on the API server's side: every series exists from the start, at 0, for every DP rank."""

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


NAME = SELECTION.name


class MultiConnector(upstream.MultiConnector):  # type: ignore[misc]  # vllm is not there when types are checked
    """Is upstream's MultiConnector with another choice of the child that loads."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        extra_configs = [config.kv_connector_extra_config for config in self._ktc_kv_transfer_config]
        self._weights = [load_weight(extra_config) for extra_config in extra_configs]
        self._patience = patience_seconds(vllm_config.kv_transfer_config.kv_connector_extra_config)
        self._counts = SelectionCounts(_labels(vllm_config))
        # Of requests that have no blocks yet: their children's answers, and since when a child is waited for.
        self._answers: dict[str, list[ChildAnswer]] = {}
        self._waiting_since: dict[str, float] = {}
        self._unanswered: dict[str, list[tuple[int, Any]]] = {}
        """Request -> children whose answer is awaited (and their places), while no other child has tokens."""
        self._keepers: dict[int, LookupKeeper] = {}
        self._unreleasable: set[int] = set()
        if role == KVConnectorRole.SCHEDULER:
            self._keep_lookups()
        effects.count(NAME, "instances")

    def _keep_lookups(self) -> None:
        for index, child in enumerate(self._connectors):
            keeper = keep_lookups(child, NAME)
            if keeper is not None:
                self._keepers[index] = keeper
            elif hasattr(child, "scheduler_adapter"):
                self._unreleasable.add(index)

    # The choice.

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Asks every child whenever there may be a choice; an earlier choice is dropped.

        While no child has tokens, only children without an answer are asked again: the scheduler asks about every
        pending lookup in every step. As soon as a child answers, all others are asked too.
        """
        request_id = request.request_id
        known: dict[int, ChildAnswer] = {}
        if (unanswered := self._unanswered.get(request_id)) is not None:
            # Hundreds of times in a step: nothing is made of an answer that there is not.
            for index, child in unanswered:
                answer = child.get_num_new_matched_tokens(request, num_computed_tokens)
                if answer[0] is not None:
                    known[index] = ChildAnswer(*answer)
            if not known:
                return None, False
            for index, _ in unanswered:
                known.setdefault(index, NO_ANSWER)
        stale = self._requests_to_connector.pop(request_id, None)
        self._counts.settled(request_id)
        answers = []
        for index, child in enumerate(self._connectors):
            if index in known:
                answers.append(known[index])
                continue
            if index in self._keepers:
                _start_anew_after_a_failed_load(child, request)
            answers.append(ChildAnswer(*child.get_num_new_matched_tokens(request, num_computed_tokens)))
        waiting_since = self._waiting_since.get(request_id)
        patient = waiting_since is None or time.monotonic() - waiting_since < self._patience
        choice = decide(answers, self._weights, unreleasable=self._unreleasable, patient=patient)
        if stale is not None and stale != choice.winner:
            effects.count(NAME, "stale-choices-dropped")
        if choice.wait:
            self._answers.pop(request_id, None)
            if choice.impatient:
                self._waiting_since.setdefault(request_id, time.monotonic())
            if any(answer.tokens for answer in answers):
                self._unanswered.pop(request_id, None)
            else:
                self._unanswered[request_id] = [
                    (index, self._connectors[index]) for index, answer in enumerate(answers) if answer.tokens is None
                ]
            return None, False
        self._unanswered.pop(request_id, None)
        self._waiting_since.pop(request_id, None)
        self._answers[request_id] = answers
        if choice.winner is None:
            return 0, False
        self._requests_to_connector[request_id] = choice.winner
        return answers[choice.winner]

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Do what upstream does, after the keepers have taken over the lookups that were not waited for."""
        winner = self._requests_to_connector.get(request.request_id)
        answers = self._answers.pop(request.request_id, None)
        self._unanswered.pop(request.request_id, None)
        if answers is not None:
            self._record(request.request_id, answers, winner, num_external_tokens)
        super().update_state_after_alloc(request, blocks, num_external_tokens)

    def _record(self, request_id: str, answers: list[ChildAnswer], winner: int | None, tokens: int) -> None:
        for index, keeper in self._keepers.items():
            keeper.scheduled(request_id, answered=answers[index].tokens is not None)
        self._counts.scheduled(request_id, answers, winner, tokens)
        if winner is None:
            return
        if any(answer.tokens is None for answer in answers):
            effects.count(NAME, "pending-lookups-overtaken")
        if winner != next(index for index, answer in enumerate(answers) if answer.tokens):
            effects.count(NAME, "chosen-by-weight")

    # Letting go.

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        for keeper in self._keepers.values():
            keeper.settle()
        return super().build_connector_meta(scheduler_output)

    def has_pending_push_work(self) -> bool:
        """Keeps the engine stepping while locks are to be given back."""
        return any(keeper.unsettled for keeper in self._keepers.values()) or super().has_pending_push_work()

    def update_connector_output(self, connector_output: Any) -> None:
        super().update_connector_output(connector_output)
        for ended in ("finished_recving", "failed_recving"):
            for request_id in getattr(connector_output, ended, None) or ():
                self._counts.settled(request_id)

    def request_finished(self, request: Any, blocks: list[int]) -> tuple[bool, dict[str, Any] | None]:
        self._forget(request.request_id)
        try:
            return super().request_finished(request, blocks)  # type: ignore[no-any-return]  # see the class
        finally:
            self._settle_finished(request.request_id)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._forget(request.request_id)
        try:
            return super().request_finished_all_groups(request, block_ids)  # type: ignore[no-any-return]  # as above
        finally:
            self._settle_finished(request.request_id)

    def _forget(self, request_id: str) -> None:
        self._answers.pop(request_id, None)
        self._unanswered.pop(request_id, None)
        self._waiting_since.pop(request_id, None)
        self._counts.settled(request_id)
        for keeper in self._keepers.values():
            keeper.finished(request_id)

    def _settle_finished(self, request_id: str) -> None:
        # Upstream leaves the choice behind when it raises for two children with transfer parameters.
        self._requests_to_connector.pop(request_id, None)
        for keeper in self._keepers.values():
            keeper.settle()

    # Statistics.

    def get_kv_connector_stats(self) -> Any:
        """Return upstream's statistics, and in the scheduler what has been counted since the last call."""
        stats = super().get_kv_connector_stats()
        counted = self._counts.take()
        if counted is not None:
            stats = stats if stats is not None else upstream.MultiKVConnectorStats()
            stats[MEMBER] = counted
        return stats

    @classmethod
    def build_kv_connector_stats(cls, data: Mapping[str, Any] | None = None) -> Any:
        if data is None or MEMBER not in data:
            return super().build_kv_connector_stats(data)
        stats = super().build_kv_connector_stats({name: value for name, value in data.items() if name != MEMBER})
        stats[MEMBER] = rebuild_stats(data[MEMBER])
        return stats

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> Any:
        metrics = super().build_prom_metrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        metrics._prom_metrics[MEMBER] = SelectionMetrics(
            vllm_config, metric_types, labelnames, per_engine_labelvalues, _labels(vllm_config)
        )
        return metrics


def _labels(vllm_config: Any) -> tuple[str, ...]:
    """Return the labels of the children, from the configuration: the scheduler and the API server use the same."""
    return labels(
        [child["kv_connector"] for child in vllm_config.kv_transfer_config.kv_connector_extra_config["connectors"]]
    )


def _start_anew_after_a_failed_load(child: Any, request: Any) -> None:
    """Makes LMCache forget a request that is asked for again because the load of another child failed.

    LMCache's tracker of a request leaves PREFETCHING when the request gets blocks, and only a preemption starts a new
    tracker. The old tracker would report a hit that no state ever loads: the request would wait for ever, and LMCache
    would store from blocks that the request no longer has. A request that had a hit of LMCache is left alone: its own
    load failed, and LMCache then bypasses it.
    """
    tracker = getattr(child, "request_trackers", {}).get(request.request_id)
    if tracker is None or request.status == RequestStatus.PREEMPTED or tracker.state.name != "READY":
        return
    if tracker.num_lmcache_hit_tokens:
        return
    del child.request_trackers[request.request_id]
    if getattr(child, "lazy_offload", False):
        child._lazy_offload_manager.on_request_reset(request.request_id)


if left_out(NAME):
    MultiConnector = upstream.MultiConnector  # type: ignore[misc]  # this upstream is unknown: the patch is skipped
