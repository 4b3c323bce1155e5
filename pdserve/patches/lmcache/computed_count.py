"""LMCache must not store tokens that the request has not computed.

LMCache's connector counts for itself how many tokens of a request are computed: what its lookup has found, or vLLM's
own prefix, and what each step schedules. vLLM decides otherwise in four cases, and does not say so:

- the load failed, and vLLM goes on behind the part that is good (a local prefix): the hit counts as computed;
- vLLM does not use the hit (`skip_reading_prefix_cache`, another child of MultiConnector loads less): likewise;
- a failed load names blocks that running requests share with it, and vLLM sets those requests back: what they compute
  again counts twice;
- vLLM computes the end of a hit again (a full hit, replays of sliding windows): likewise.

The count is then too high, and once the blocks of a chunk are allocated the chunk is stored, its last block in part
computed. Here the count is brought down to what the scheduler's output says: in the step in which a request is
admitted, and, of those that were running when blocks were reported as invalid, in their next one. It is never raised.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from pdserve.patches import effects
from pdserve.patches.lmcache.clients import HOOK, once_loaded
from pdserve.patches.patch import Patch, Target
from pdserve.patches.wrap import wrap

NAME = "lmcache-computed-count"
_DOUBTED = "pdserve_doubted_counts"
"""Attribute of a connector: requests that vLLM may have set back since their last step."""
_INSIDE_VLLM = "vllm.distributed.kv_transfer.kv_connector.v1.lmcache_mp_connector"
_LMCACHE = "lmcache.integration.vllm.lmcache_mp_connector"
_METADATA = "lmcache.integration.vllm.lmcache_mp_metadata"
"""Where lmcache has the count; before 0.5.4 beside the connector."""


def apply() -> None:
    """Wraps two methods of LMCacheMPConnector as soon as vLLM has imported it; matters in EngineCore."""
    once_loaded(NAME, _wrap_connectors)


def _wrap_connectors() -> None:
    for module in (_LMCACHE, _INSIDE_VLLM):
        connector = getattr(sys.modules.get(module), "LMCacheMPConnector", None)
        if connector is not None:
            wrap(connector, "build_connector_meta", patch=NAME, around=_with_true_counts)
            wrap(connector, "update_connector_output", patch=NAME, around=_doubting)


def _with_true_counts(original: Callable[..., Any]) -> Callable[..., Any]:
    def build_connector_meta(self: Any, scheduler_output: Any) -> Any:
        for new in scheduler_output.scheduled_new_reqs:
            _lower(self, new.req_id, new.num_computed_tokens)
        cached, doubted = scheduler_output.scheduled_cached_reqs, getattr(self, _DOUBTED, None)
        if cached.resumed_req_ids or doubted:
            for request_id, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
                if request_id in cached.resumed_req_ids or (doubted and request_id in doubted):
                    _lower(self, request_id, computed)
        if doubted:
            doubted.difference_update(cached.req_ids, (new.req_id for new in scheduler_output.scheduled_new_reqs))
            doubted.intersection_update(self.request_trackers)
        return original(self, scheduler_output)

    return build_connector_meta


def _doubting(original: Callable[..., None]) -> Callable[..., None]:
    def update_connector_output(self: Any, connector_output: Any) -> None:
        original(self, connector_output)
        if connector_output.invalid_block_ids:
            setattr(self, _DOUBTED, set(self.request_trackers))

    return update_connector_output


def _lower(connector: Any, request_id: str, computed: int) -> None:
    """`computed`: tokens before this step. Called before the connector adds those of this step."""
    tracker = connector.request_trackers.get(request_id)
    if tracker is None:
        return
    excess = tracker.num_scheduled_tokens + _hit(connector, tracker) - computed
    if excess > 0:
        # The hits stay as they are: they are told to clients, and say where storing goes on.
        tracker.num_scheduled_tokens -= excess
        effects.count(NAME, "counts-lowered")


def _hit(connector: Any, tracker: Any) -> int:
    """The tokens with which upstream's count begins. lmcache < 0.4.7 and vLLM 0.21's own class count in blocks."""
    if hasattr(tracker, "num_lmcache_hit_tokens"):
        return int(max(tracker.num_vllm_hit_tokens, tracker.num_lmcache_hit_tokens))
    blocks = max(tracker.num_vllm_hit_blocks, tracker.num_lmcache_hit_blocks)
    return int(blocks * connector._vllm_config.cache_config.block_size)


PATCH = Patch(
    name=NAME,
    behaviour="E",
    summary=(
        "LMCache's connector counts what its lookup has found as computed, although the load failed behind a local "
        "prefix, or vLLM did not use it. The count runs ahead, and a chunk is stored whose last block is computed in "
        "part: wrong KV, which later requests load. The count is lowered to vLLM's own when a request is admitted, and "
        "after invalid blocks."
    ),
    issue="not reported yet: docs/upstream-issues.md, the last but one",
    targets=(
        HOOK,
        *(
            Target(f"{module}.LMCacheMPConnector.{name}", only=only)
            for module, only in ((_LMCACHE, ">=0.4.7"), (_INSIDE_VLLM, "<0.22"))
            for name in ("build_connector_meta", "update_connector_output")
        ),
        *(
            Target(f"{module}.{name}", body=True, only=only)
            for module, only in ((_METADATA, ">=0.5"), (_LMCACHE, ">=0.4.7,<0.5.4"), (_INSIDE_VLLM, "<0.22"))
            for name in (
                "LMCacheMPRequestTracker.increase_num_scheduled_tokens",
                "LMCacheMPRequestMetadata.GetStoreMetadata",
            )
        ),
    ),
    runs_in=("engine-core",),
    connectors=frozenset({"LMCacheMPConnector"}),
    required=True,
    effects={"counts-lowered": "times that LMCache counted more tokens of a request as computed than vLLM has"},
    remove_when="LMCacheMPConnector takes the count of computed tokens from the scheduler's output",
    apply=apply,
)
