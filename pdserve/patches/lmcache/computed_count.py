"""Patch lmcache-computed-count: LMCache stores no tokens that the request has not computed.

LMCache's connector counts by itself how many tokens of a request are computed: the hit of its lookup, or vLLM's own
prefix, and what each step schedules. vLLM decides otherwise in four cases, and does not notify its connector:

- the load failed, and vLLM goes on behind the part that is good (a local prefix): the hit counts as computed;
- vLLM does not use the hit (`skip_reading_prefix_cache`, another child of MultiConnector loads less): likewise;
- a failed load names blocks that running requests share with it, and vLLM sets those requests back: what they compute
  again counts twice;
- vLLM computes the end of a hit again (a full hit, replays of sliding windows): likewise.

The count is then too high, and once the blocks of a chunk are allocated the chunk is stored, its last block in part
computed. Here the count is lowered to that of the scheduler's output: in the step in which a request is
admitted, and, of those that were running when blocks were reported as invalid, in their next one. It is never raised.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from pdserve.patches import effects
from pdserve.patches.lmcache.clients import HOOK, once_loaded
from pdserve.patches.patch import Patch, PatchTarget, wrap

NAME = "lmcache-computed-count"
_DOUBTED = "pdserve_doubted_counts"
"""Attribute of a connector: requests that vLLM may have set back since their last step."""
_CONNECTOR = "lmcache.integration.vllm.lmcache_mp_connector"
_METADATA = "lmcache.integration.vllm.lmcache_mp_metadata"
"""The module of LMCache that has the count."""


def apply() -> None:
    """Wraps two methods of LMCacheMPConnector as soon as vLLM has imported it; matters in EngineCore."""
    once_loaded(NAME, _wrap_connector)


def _wrap_connector() -> None:
    connector = getattr(sys.modules.get(_CONNECTOR), "LMCacheMPConnector", None)
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
    """Lower a request's count of scheduled tokens to what is computed. `computed`: tokens before this step. This is
    called before the connector adds those of this step."""
    tracker = connector.request_trackers.get(request_id)
    if tracker is None:
        return
    # Upstream's count begins with the longer of the two hits.
    hit = max(tracker.num_vllm_hit_tokens, tracker.num_lmcache_hit_tokens)
    excess = tracker.num_scheduled_tokens + hit - computed
    if excess > 0:
        # The hits stay as they are: clients see them, and storing goes on behind them.
        tracker.num_scheduled_tokens -= excess
        effects.count(NAME, "counts-lowered")


PATCH = Patch(
    name=NAME,
    behaviour="failed and late loads",
    summary=(
        "LMCache's connector counts the hit of its lookup as computed, although the load failed behind a local "
        "prefix, or vLLM did not use it. The count runs ahead, and a chunk is stored whose last block is computed in "
        "part: wrong KV, which later requests load. The count is lowered to vLLM's own when a request is admitted, and "
        "after invalid blocks."
    ),
    issue='not reported yet: docs/upstream-issues.md, "a chunk is stored although"',
    targets=(
        HOOK,
        *(
            PatchTarget(f"{_CONNECTOR}.LMCacheMPConnector.{name}")
            for name in ("build_connector_meta", "update_connector_output")
        ),
        *(
            PatchTarget(f"{_METADATA}.{name}", body=True)
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
