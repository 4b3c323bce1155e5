"""Patches of the memory of LMCache's server on ROCm: L1 is pinned as it is used, and evicted by its final size."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

from pdserve.errors import StartError
from pdserve.patches import effects
from pdserve.patches.patch import Patch, PatchTarget, wrap

SWITCH = "LMCACHE_ROCM_DEMAND_PINNED_ALLOCATOR"
"""1 in `lmcache.env` asks for this patch and for lmcache-final-capacity."""
STEP = "LMCACHE_ROCM_DEMAND_PINNED_STEP_GB"
"""GiB pinned at once when L1 has to grow; 64 unless set. The store that asks for it waits for that long."""

_NAME = "lmcache-demand-pinned"
_STEP_GIB = 64
_GIB = 1 << 30
_growth = threading.Lock()
"""One thread at a time pins memory: a server has one such allocator."""
_CLASS = "lmcache.v1.memory_allocators.lazy_memory_allocator.LazyMemoryAllocator"


def _apply_demand_pinned() -> None:
    """Ends the thread that pins in the background, and grows where an allocation finds no room.

    Raises StartError when STEP is not a number of GiB.
    """
    step = step_bytes(os.environ.get(STEP))
    from lmcache.v1.memory_allocators.lazy_memory_allocator import LazyMemoryAllocator

    wrap(LazyMemoryAllocator, "_expand_worker", patch=_NAME, around=_nothing_in_the_background)
    for method in ("allocate", "batched_allocate"):
        wrap(LazyMemoryAllocator, method, patch=_NAME, around=lambda original: _grow_to_allocate(original, step))


def step_bytes(text: str | None) -> int:
    """Return the value of STEP in bytes; None or empty: the default. Raises StartError."""
    if not (text or "").strip():
        return _STEP_GIB * _GIB
    try:
        step = float(text or "")
    except ValueError:
        step = 0
    if not 0 < step < float("inf"):
        raise StartError(f"{STEP}={text} is not a positive number of GiB")
    return int(step * _GIB)


def _nothing_in_the_background(_original: Callable[..., None]) -> Callable[..., None]:
    """Replace a function with one that does nothing. It is the one function that is not called: pinning in the
    background is what this patch is against."""

    def expand_worker(_self: Any) -> None:
        """Do nothing: this is all that the thread does; it ends at once, and `close` joins it as before."""

    return expand_worker


def _grow_to_allocate(original: Callable[..., Any], step: int) -> Callable[..., Any]:
    def allocate(self: Any, *args: Any, **kwargs: Any) -> Any:
        while True:
            seen = self._curr_size
            allocated = original(self, *args, **kwargs)
            if allocated is not None or seen >= self._final_size or not _grow(self, seen, step):
                return allocated

    return allocate


def _grow(allocator: Any, seen: int, step: int) -> bool:
    """Pins and commits `step` more, unless another thread has done so since the size was `seen`. False: nothing more to
    have (the allocator is being closed)."""
    with _growth:
        if allocator._curr_size > seen:
            return True
        target = min(allocator._final_size, seen + max(step, allocator.COMMIT_SIZE))
        committed = seen
        while allocator._curr_size < target and not allocator._stop_expand.is_set():
            allocator._pin_memory_chunk(allocator._curr_size, allocator.PIN_CHUNK_SIZE)
            allocator._curr_size += allocator.PIN_CHUNK_SIZE
            if allocator._curr_size - committed >= allocator.COMMIT_SIZE or allocator._curr_size >= target:
                allocator._commit_expansion(allocator._curr_size - committed)
                committed = allocator._curr_size
        if (grown := committed - seen) > 0:
            allocator._log_expansion_progress(grown)
            effects.count(_NAME, "expansions")
            effects.gauge(_NAME, "pinned_bytes", committed)
        return committed > seen


DEMAND_PINNED = Patch(
    name=_NAME,
    behaviour="LMCache server",
    summary=(
        "LMCache's allocator pins all of L1 in a background thread from its first second. On ROCm pinning terabytes "
        "stalls the opening of the engines' IPC handles, so their registration times out. With it L1 grows when an "
        "allocation finds no room, in steps."
    ),
    issue="not reported upstream; LazyMemoryAllocator._expand_worker of lmcache 0.5.6",
    targets=tuple(
        PatchTarget(f"{_CLASS}.{method}", body=body)
        for method, body in (
            ("_expand_worker", True),
            ("_pin_memory_chunk", False),
            ("_commit_expansion", False),
            ("_log_expansion_progress", False),
            ("allocate", True),
            ("batched_allocate", True),
        )
    ),
    runs_in=("lmcache-server",),
    platforms=("rocm",),
    settings=frozenset({SWITCH}),
    required=False,
    effects={"expansions": "times that L1 was grown because an allocation did not fit"},
    gauges={"pinned_bytes": "bytes of L1 that are pinned"},
    remove_when="LMCache pins L1 as it is used, instead of all of it from the start",
    apply=_apply_demand_pinned,
)


_CAPACITY_NAME = "lmcache-final-capacity"


def _apply_final_capacity() -> None:
    """Wraps L1MemoryManager.get_memory_usage, which the eviction controller and /status ask."""
    from lmcache.v1.distributed.memory_manager import L1MemoryManager

    wrap(L1MemoryManager, "get_memory_usage", patch=_CAPACITY_NAME, around=_of_final_capacity)


def _of_final_capacity(original: Callable[[Any], tuple[int, int]]) -> Callable[[Any], tuple[int, int]]:
    def get_memory_usage(self: Any) -> tuple[int, int]:
        used, total = original(self)
        # Only the allocator that grows has it; the others have all of their memory from the start.
        return used, max(total, getattr(self._allocator, "_final_size", total))

    return get_memory_usage


FINAL_CAPACITY = Patch(
    name=_CAPACITY_NAME,
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
    apply=_apply_final_capacity,
)
