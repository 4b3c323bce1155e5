"""A model with recurrent state must go on from a position of which every KV group has what it needs.

With a connector, vLLM 0.24 to 0.27 look into the prefix cache group by group, and take the full attention's hit, or the
longest of all (until 0.26), as that of the model: a connector would bring the recurrent state that is missing there.
Only NIXL's decode does. With LMCache or Mooncake, and on a prefill, which receives no KV, the request goes on
without a state, or from a wrong one, and the answer is nonsense. 0.27 falls back to the common hit where the connector
offers nothing; since 0.28 a connector has to say that it can, and only NIXL does.

Where the groups disagree, the answer is here what they have in common, as without a connector. NIXL keeps upstream's
answer where upstream falls back (0.27).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pdserve.patches import effects
from pdserve.patches.patch import Patch, PatchTarget, wrap

NAME = "common-local-hit"
BROUGHT_TOGETHER = "hits-brought-together"
"""What it counts."""
_COMMON = "pdserve_common_hit"
"""Attribute of a coordinator: its scheduler's connector does not bring what a group lacks."""

Hits = tuple[tuple[list[Any], ...], tuple[int, ...]]
"""Blocks of each group, and how many tokens they are."""


def apply() -> None:
    """Wraps Scheduler.__init__ and a method of HybridKVCacheCoordinator; matters in EngineCore."""
    from vllm.v1.core.kv_cache_coordinator import HybridKVCacheCoordinator
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.scheduler import Scheduler

    falls_back = hasattr(KVCacheManager, "get_computed_blocks_for_connector")
    wrap(Scheduler, "__init__", patch=NAME, around=lambda original: _marking(original, falls_back))
    wrap(HybridKVCacheCoordinator, "find_longest_cache_hit_per_group", patch=NAME, around=_in_common)


def _marking(original: Callable[..., None], falls_back: bool) -> Callable[..., None]:
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if not (falls_back and _brings_states(self.connector)):
            setattr(self.kv_cache_manager.coordinator, _COMMON, True)

    return init


def _brings_states(connector: Any) -> bool:
    """Decide as upstream does since 0.28: NIXL, and MultiConnector if all of its children do."""
    children = getattr(connector, "_connectors", None)
    if children:
        return all(_brings_states(child) for child in children)
    return any(cls.__name__ == "NixlBaseConnector" for cls in type(connector).__mro__)


def _in_common(original: Callable[..., Hits]) -> Callable[..., Hits]:
    def find_longest_cache_hit_per_group(self: Any, block_hashes: Any, max_cache_hit_length: int) -> Hits:
        blocks, lengths = original(self, block_hashes, max_cache_hit_length)
        if not getattr(self, _COMMON, False) or len(set(lengths)) == 1:
            return blocks, lengths
        common, length, *_ = self.find_longest_cache_hit(block_hashes, max_cache_hit_length)
        effects.count(NAME, BROUGHT_TOGETHER)
        return common, (length,) * len(lengths)

    return find_longest_cache_hit_per_group


_CORE = "vllm.v1.core."

PATCH = Patch(
    name=NAME,
    behaviour="hybrid models",
    summary=(
        "With a connector, vLLM takes the full attention's hit in the prefix cache, or the longest of all KV groups, "
        "for that of a model with recurrent state, and goes on from a position of which it has no state: nonsense. "
        "Only NIXL brings the state. Where the groups disagree, what they have in common is taken, as without one."
    ),
    issue="https://github.com/vllm-project/vllm/pull/50344",
    vllm="<0.28",
    targets=(
        PatchTarget(f"{_CORE}sched.scheduler.Scheduler.__init__"),
        PatchTarget(
            f"{_CORE}kv_cache_coordinator.HybridKVCacheCoordinator.find_longest_cache_hit_per_group",
            only="<0.28",
        ),
        PatchTarget(
            f"{_CORE}kv_cache_coordinator.HybridKVCacheCoordinator.find_longest_cache_hit",
            only="<0.28",
        ),
    ),
    runs_in=("engine-core",),
    required=True,
    serves_without=(
        "a model with recurrent state may go on from a position of which it has no state, and answers nonsense; other "
        "models are not concerned"
    ),
    effects={BROUGHT_TOGETHER: "lookups in the prefix cache of which the KV groups had hits of different lengths"},
    remove_when="vllm 0.28 is the oldest supported version: a connector has to say that it brings states",
    apply=apply,
)
