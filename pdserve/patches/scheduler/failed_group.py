"""Patch failed-group: a failed load of a hybrid model's KV costs a recomputation, not the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from pdserve.patches import effects
from pdserve.patches.patch import Patch, PatchTarget, wrap

NAME = "failed-group"
RECOMPUTATIONS = "whole-recomputations"
"""What it counts."""
_RANGE = "<0.30"


def apply() -> None:
    """Wraps Scheduler._update_requests_with_invalid_blocks; matters in EngineCore."""
    from vllm.v1.core.sched.scheduler import Scheduler

    wrap(
        Scheduler,
        "_update_requests_with_invalid_blocks",
        patch=NAME,
        around=lambda original: whole_requests(original, NAME),
    )


Affected = tuple[set[str], int, set[int]]
"""Ids of requests, tokens to be computed again, blocks to be evicted."""


def whole_requests(original: Callable[..., Affected], patch: str) -> Callable[..., Affected]:
    """Wrap the scheduler's update, so that a request with an invalid block is computed as a whole. `patch`: the name
    under which a recomputation is counted."""

    def _update_requests_with_invalid_blocks(
        self: Any,
        requests: Iterable[Any],
        invalid_block_ids: set[int],
        num_scheduled_tokens: dict[str, int],
        evict_blocks: bool = True,
    ) -> Affected:
        if len(self.kv_cache_config.kv_cache_groups) == 1:
            return original(self, requests, invalid_block_ids, num_scheduled_tokens, evict_blocks)
        # One block stands for all positions without KV, in every request: it is no request's failure.
        invalid = set(invalid_block_ids) - {self.kv_cache_manager.block_pool.null_block.block_id}
        affected: Affected = (set(), 0, set())
        for request in requests:
            groups = self.kv_cache_manager.get_block_ids(request.request_id)
            held = {block for group in groups for block in group}
            if not held & invalid:
                continue
            # A block is a different span of tokens in each group: there is no common prefix to keep.
            computed = request.num_computed_tokens - num_scheduled_tokens.get(request.request_id, 0)
            request.num_computed_tokens = 0
            names, tokens, evicted = affected
            affected = (
                names | {request.request_id},
                tokens + computed,
                evicted | (held if evict_blocks else set()),
            )
            effects.count(patch, RECOMPUTATIONS)
        return affected

    return _update_requests_with_invalid_blocks


TARGETS = (
    PatchTarget("vllm.v1.core.sched.scheduler.Scheduler._update_requests_with_invalid_blocks", body=True),
    PatchTarget("vllm.v1.core.sched.scheduler.Scheduler._handle_invalid_blocks", body=True),
)

PATCH = Patch(
    name=NAME,
    behaviour="failed and late loads",
    summary=(
        "A connector reports blocks that failed to load; with several KV groups (hybrid models) the scheduler unpacks "
        "the groups of a request as if there were one, and EngineCore dies of a ValueError. The request is computed "
        "anew as a whole, whichever group has failed."
    ),
    issue="https://github.com/vllm-project/vllm/issues/45474",
    vllm=_RANGE,
    targets=TARGETS,
    runs_in=("engine-core",),
    connectors=frozenset({"LMCacheMPConnector"}),
    required=False,
    effects={RECOMPUTATIONS: "requests of hybrid models that are computed anew after a failed load"},
    remove_when="vllm 0.30 is the oldest supported version: it does the same (vllm#50388)",
    apply=apply,
)
