"""LMCacheMPConnector that gives back its read locks and bounds its reloads: patches lmcache-lookup-locks (vllm#44100),
lmcache-load-cap (lmcache#3382) and lmcache-min-load, which have when each can go.

vLLM loads the class through kv_connector_module_path. It keeps upstream's name, by which vLLM looks up its statistics
and MultiConnector its children.

Read locks of a request that ends before it has blocks are given back (lmcache-lookup-locks), with bounds or without.

A bounded reload takes a prefix of the lookup's hit. The lookup has put a read lock on every chunk of it,
and LMCache releases locks only for what is retrieved or handed back; they are anonymous counters, so each must be
released once. vLLM asks in every step while it lacks blocks, and allocates once: so asking only lowers the request's
tracker, and the locks beyond it go back when blocks are allocated, or when the request ends before that.
"""

from __future__ import annotations

import os
from typing import Any

from pdserve.connectors.lmcache_loads import (
    Bounds,
    CutHit,
    awaits_admission,
    check_chunk,
    check_prefixes_load,
    last_cut,
    lower_load_end,
    read_bounds,
    remember,
)
from pdserve.connectors.selection_lookups import keep_lookups
from pdserve.patches import effects
from pdserve.patches.lmcache import reloads
from pdserve.patches.record import is_active, left_out

LOOKUP_LOCKS = reloads.LOOKUP_LOCKS.name
LOAD_CAP = reloads.LOAD_CAP.name
MIN_LOAD = reloads.MIN_LOAD.name


def upstream_class() -> Any:
    """Return LMCache's own connector class.

    vLLM takes its own class when LMCache's cannot be imported, and that class cannot talk to LMCache 0.5. Here the
    import error is shown instead.
    """
    from lmcache.integration.vllm import lmcache_mp_connector

    return lmcache_mp_connector.LMCacheMPConnector


_Upstream: Any = upstream_class()


class LMCacheMPConnector(_Upstream):  # type: ignore[misc]  # vllm is not there when types are checked
    """Reloads at most `pdserve.max_tokens_per_load` and at least `pdserve.min_load_tokens` tokens of a request."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        set_to = read_bounds(vllm_config.kv_transfer_config.kv_connector_extra_config, os.environ)
        self._bounds = Bounds(
            cap=0 if left_out(LOAD_CAP) else set_to.cap, least=0 if left_out(MIN_LOAD) else set_to.least
        )
        if self._bounds.cap:
            check_prefixes_load(kv_cache_config)
        super().__init__(vllm_config, role, kv_cache_config)
        keeps = not left_out(LOOKUP_LOCKS)
        for name, used in ((LOOKUP_LOCKS, keeps), (LOAD_CAP, self._bounds.cap), (MIN_LOAD, self._bounds.least)):
            effects.count(name, "instances", 1 if used else 0)
        self._keeper: Any = None
        if hasattr(self, "scheduler_adapter"):
            self._set_up_scheduler()

    def _set_up_scheduler(self) -> None:
        self._tokens_per_chunk = int(self.scheduler_adapter.lmcache_tokens_per_chunk)
        check_chunk(self._bounds, self._tokens_per_chunk)
        if not left_out(LOOKUP_LOCKS):
            self._keeper = keep_lookups(self, LOOKUP_LOCKS)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return upstream's answer, bounded. It is safe to ask in every step, with a local prefix that grows or
        shrinks."""
        offered, load_async = super().get_num_new_matched_tokens(request, num_computed_tokens)
        if not offered:
            return offered, load_async
        tracker = self.request_trackers.get(request.request_id)
        if tracker is None or not awaits_admission(tracker):
            return offered, load_async
        hit = tracker.num_lmcache_hit_tokens
        taken = self._bounds.take(computed=num_computed_tokens, hit=hit, offered=offered, chunk=self._tokens_per_chunk)
        lower_load_end(tracker, taken.end)
        remember(tracker, CutHit(hit, skipped=taken.tokens == 0, left=offered - taken.tokens))
        return taken.tokens, load_async and taken.tokens > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Release the locks of what is not loaded: upstream does so below the lowered end, then this does beyond it."""
        tracker = self.request_trackers.get(request.request_id)
        admitted = tracker is not None and awaits_admission(tracker)
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if self._keeper is not None:
            self._keeper.scheduled(request.request_id, answered=True)
        if admitted:
            self._release_beyond(request.request_id, tracker, num_external_tokens)

    def _release_beyond(self, request_id: str, tracker: Any, loaded: int) -> None:
        cut, end = last_cut(tracker), tracker.num_lmcache_hit_tokens
        if cut is None or cut.hit <= end:
            return
        self.scheduler_adapter.free_lookup_locks(
            token_ids=tracker.get_token_ids(),
            start=end,
            end=cut.hit,
            request_id=request_id,
            cache_salt=tracker.cache_salt,
            request_configs=tracker.request_configs,
        )
        if cut.skipped:
            effects.count(MIN_LOAD, "loads-skipped")
            effects.count(MIN_LOAD, "tokens-left-to-recompute", cut.left)
        elif loaded:
            effects.count(LOAD_CAP, "loads-capped")
            effects.count(LOAD_CAP, "tokens-left-to-recompute", cut.left)

    # A request that ends before it has blocks: upstream only ends its session, which leaves its locks to the read TTL.

    def request_finished(self, request: Any, block_ids: Any) -> Any:
        if self._keeper is None:
            return super().request_finished(request, block_ids)
        self._keeper.finished(request.request_id)
        try:
            return super().request_finished(request, block_ids)
        finally:
            self._keeper.settle()

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        if self._keeper is not None:
            self._keeper.settle()
        return super().build_connector_meta(scheduler_output)

    def has_pending_push_work(self) -> bool:
        """Keeps the engine stepping while locks are to be given back."""
        return bool(self._keeper is not None and self._keeper.unsettled) or bool(super().has_pending_push_work())


_OURS = (LOOKUP_LOCKS, LOAD_CAP, MIN_LOAD)
if any(map(left_out, _OURS)) and not any(map(is_active, _OURS)):
    LMCacheMPConnector = _Upstream  # type: ignore[misc]  # this upstream is unknown: the patches are skipped
