"""LMCache must know the blocks of a request that MultiConnector lets nobody, or another child, load."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pdserve.patches import effects
from pdserve.patches.patch import Patch, Target
from pdserve.patches.wrap import wrap

_NAME = "multiconnector-loser-blocks"


def apply() -> None:
    """Wraps MultiConnector.update_state_after_alloc; matters in EngineCore."""
    from vllm.distributed.kv_transfer.kv_connector.v1 import multi_connector

    wrap(multi_connector.MultiConnector, "update_state_after_alloc", patch=_NAME, around=_tell_lmcache)


def _tell_lmcache(original: Callable[..., None]) -> Callable[..., None]:
    def update_state_after_alloc(self: Any, request: Any, blocks: Any, num_external_tokens: int) -> None:
        original(self, request, blocks, num_external_tokens)
        chosen = self._requests_to_connector.get(request.request_id, -1)
        for index, child in enumerate(self._connectors):
            if index != chosen and _is_lmcache(child) and not _loads_all_the_same(child, request.request_id):
                # The connector is prepared for a second call: it takes over the blocks that it does not know yet.
                child.update_state_after_alloc(request, blocks, 0)
                effects.count(_NAME, "requests-told")

    return update_state_after_alloc


def _is_lmcache(child: Any) -> bool:
    return any(one.__name__.startswith("LMCacheMPConnector") for one in type(child).__mro__)


def _loads_all_the_same(child: Any, request_id: str) -> bool:
    """Before lmcache 0.5.5 (lmcache#4355) a hit is loaded whoever was chosen: not into these blocks, then.

    The state came with the release that told the two apart.
    """
    tracker = child.request_trackers[request_id]
    hit = getattr(tracker, "num_lmcache_hit_tokens", 0) or getattr(tracker, "num_lmcache_hit_blocks", 0)
    return bool(hit) and not hasattr(type(tracker.state), "BYPASS_LMCACHE")


PATCH = Patch(
    name=_NAME,
    behaviour="D",
    summary=(
        "MultiConnector tells children that do not load of no blocks, and LMCache then takes the blocks of a prompt's "
        "later steps for its first ones: it stores KV under the keys of other tokens, which later requests load. "
        "LMCache is told of the request's real blocks, and to load nothing, as upstream does since 0.26."
    ),
    issue="https://github.com/vllm-project/vllm/pull/46865",
    vllm="<0.26",
    targets=(
        Target(
            "vllm.distributed.kv_transfer.kv_connector.v1.multi_connector.MultiConnector.update_state_after_alloc",
            body=True,
        ),
    ),
    runs_in=("engine-core",),
    connectors=frozenset({"MultiConnector", "LMCacheMPConnector"}),
    required=True,
    instead="a single connector in place of multi, without LMCache on that role",
    effects={"requests-told": "requests of whose blocks LMCache was told although another child, or none, loads"},
    remove_when="vllm 0.26 is the oldest supported version",
    apply=apply,
)
