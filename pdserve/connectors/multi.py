"""MultiConnector that weighs its children's hits, does not wait for one that is slow to answer, and counts.

Same class name as upstream, which compares names (HMA, has_connector); vLLM loads it through kv_connector_module_path.
Works on vllm 0.21 to 0.33. What upstream does beyond the choice (saving to every child, counting async saves, groups
of hybrid models) is left to it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1 import multi_connector as upstream
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.request import RequestStatus

from pdserve.connectors.selection import NO_ANSWER, Answer, decide, labels, load_weight, patience_seconds
from pdserve.connectors.selection_lookups import LookupKeeper, keep_lookups
from pdserve.connectors.selection_stats import MEMBER, SelectionCounts, SelectionMetrics, rebuilt
from pdserve.patches import effects
from pdserve.patches.multiconnector.selection import PATCH
from pdserve.patches.record import left_out

NAME = PATCH.name


class MultiConnector(upstream.MultiConnector):  # type: ignore[misc]  # vllm is not there when types are checked
    """Upstream's MultiConnector with another choice of the child that loads."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        extra_configs = [config.kv_connector_extra_config for config in self._ktc_kv_transfer_config]
        self._weights = [load_weight(extra_config) for extra_config in extra_configs]
        self._patience = patience_seconds(vllm_config.kv_transfer_config.kv_connector_extra_config)
        self._counts = SelectionCounts(_labels(vllm_config))
        # Of requests between the question and their blocks: what was answered, and since when somebody is waited for.
        self._answers: dict[str, list[Answer]] = {}
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

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """Upstream does not pass it on in 0.21, and a child's admission control needs it."""
        if hasattr(super(), "bind_gpu_block_pool"):
            super().bind_gpu_block_pool(gpu_block_pool)
            return
        for child in self._connectors:
            if hasattr(child, "bind_gpu_block_pool"):
                child.bind_gpu_block_pool(gpu_block_pool)

    # The choice.

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Asks every child, whenever there may be a choice; the choice of an earlier time counts for nothing.

        While nobody has tokens, only those are asked again that had no answer: the scheduler asks about every pending
        lookup in every step. Once one of them answers, all others are asked too.
        """
        request_id = request.request_id
        known: dict[int, Answer] = {}
        if (unanswered := self._unanswered.get(request_id)) is not None:
            # Hundreds of times in a step: nothing is made of an answer that there is not.
            for index, child in unanswered:
                answer = child.get_num_new_matched_tokens(request, num_computed_tokens)
                if answer[0] is not None:
                    known[index] = Answer(*answer)
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
            answers.append(Answer(*child.get_num_new_matched_tokens(request, num_computed_tokens)))
        waiting_since = self._waiting_since.get(request_id)
        patient = waiting_since is None or time.monotonic() - waiting_since < self._patience
        decision = decide(answers, self._weights, unreleasable=self._unreleasable, patient=patient)
        if stale is not None and stale != decision.winner:
            effects.count(NAME, "stale-choices-dropped")
        if decision.wait:
            self._answers.pop(request_id, None)
            if decision.impatient:
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
        if decision.winner is None:
            return 0, False
        self._requests_to_connector[request_id] = decision.winner
        return answers[decision.winner]

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Upstream's, once the lookups of children that were not waited for are in safe hands."""
        winner = self._requests_to_connector.get(request.request_id)
        answers = self._answers.pop(request.request_id, None)
        self._unanswered.pop(request.request_id, None)
        if answers is not None:
            self._record(request.request_id, answers, winner, num_external_tokens)
        super().update_state_after_alloc(request, blocks, num_external_tokens)

    def _record(self, request_id: str, answers: list[Answer], winner: int | None, tokens: int) -> None:
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
        """Keeps the engine stepping while locks are to be given back (vllm 0.24 and later ask)."""
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
        """A worker's are never None: before vllm 0.24 the scheduler adds its own only to those of a worker."""
        stats = super().get_kv_connector_stats()
        if self.role != KVConnectorRole.SCHEDULER:
            return stats if stats is not None else upstream.MultiKVConnectorStats()
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
        stats[MEMBER] = rebuilt(data[MEMBER])
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
    """Of the configuration, so that the scheduler and the API server use the same ones."""
    return labels(
        [child["kv_connector"] for child in vllm_config.kv_transfer_config.kv_connector_extra_config["connectors"]]
    )


def _start_anew_after_a_failed_load(child: Any, request: Any) -> None:
    """Lets LMCache forget a request that is asked for again because the load of another child failed (lmcache 0.5.6).

    Its tracker of a request leaves PREFETCHING when the request gets blocks, and only a preemption starts a new one.
    With the old one a hit would be promised that no state ever loads, so that the request waits for ever, and what is
    computed then would be stored from the blocks that the request no longer has. A request that had a hit is left
    alone: its own load failed, and LMCache (0.5.5) then stands aside.
    """
    tracker = getattr(child, "request_trackers", {}).get(request.request_id)
    if tracker is None or request.status == RequestStatus.PREEMPTED or tracker.state.name != "READY":
        return
    if getattr(tracker, "num_lmcache_hit_tokens", 0) or getattr(tracker, "num_lmcache_hit_blocks", 0):
        return
    del child.request_trackers[request.request_id]
    if getattr(child, "lazy_offload", False):
        child._lazy_offload_manager.on_request_reset(request.request_id)


if left_out(NAME):
    MultiConnector = upstream.MultiConnector  # type: ignore[misc]  # this upstream is unknown: the patch is skipped
