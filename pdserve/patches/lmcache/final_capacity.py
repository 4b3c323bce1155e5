"""Patch lmcache-final-capacity: eviction begins at a share of the configured L1, not of what is pinned so far."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pdserve.patches.lmcache.demand_pinned import SWITCH
from pdserve.patches.patch import Patch, PatchTarget
from pdserve.patches.wrap import wrap

_NAME = "lmcache-final-capacity"


def apply() -> None:
    """Wraps L1MemoryManager.get_memory_usage, which the eviction controller and /status ask."""
    from lmcache.v1.distributed.memory_manager import L1MemoryManager

    wrap(L1MemoryManager, "get_memory_usage", patch=_NAME, around=_of_final_capacity)


def _of_final_capacity(original: Callable[[Any], tuple[int, int]]) -> Callable[[Any], tuple[int, int]]:
    def get_memory_usage(self: Any) -> tuple[int, int]:
        used, total = original(self)
        # Only the allocator that grows has it; the others have all of their memory from the start.
        return used, max(total, getattr(self._allocator, "_final_size", total))

    return get_memory_usage


PATCH = Patch(
    name=_NAME,
    behaviour="LMCache server",
    summary=(
        "The eviction watermark is a share of the memory that LMCache's growing allocator has committed so far. While "
        "it grows that is less than L1, so KV is evicted although there is room; if it grows on demand, it never "
        "grows. With it the share is of the final size."
    ),
    issue="not reported upstream; L1MemoryManager.get_memory_usage of lmcache 0.5.6",
    targets=(PatchTarget("lmcache.v1.distributed.memory_manager.l1_memory_manager.L1MemoryManager.get_memory_usage"),),
    runs_in=("lmcache-server",),
    platforms=("rocm",),
    settings=frozenset({SWITCH}),
    required=False,
    remove_when="LMCache's get_memory_usage counts what its growing allocator may still commit",
    apply=apply,
)
