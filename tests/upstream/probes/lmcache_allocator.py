"""LMCache's growing allocator and its eviction watermark, without and with our patches, on a scaled-down L1.

Pinning needs a device runtime; a recorder stands in for it. Sizes are upstream's, divided by 1024.
"""

from __future__ import annotations

import importlib
import itertools
import json
import os
import threading
from types import SimpleNamespace
from typing import Any

from pdserve.patches import effects
from pdserve.patches.lmcache import demand_pinned, final_capacity

KIB = 1 << 10
INITIAL, FINAL = 20 << 20, 100 << 20
"""20 and 100 GiB, divided by 1024."""


class Pinning:
    """Stands in for the device runtime, and remembers what was pinned."""

    is_pin_supported = True

    def __init__(self) -> None:
        self.pinned: dict[int, int] = {}

    def pin_memory(self, pointer: int, size: int, flags: int) -> bool:
        self.pinned[pointer] = size
        return True

    def unpin_memory(self, pointer: int) -> bool:
        del self.pinned[pointer]
        return True

    @property
    def bytes(self) -> int:
        return sum(self.pinned.values())


def scaled(pinning: Pinning) -> Any:
    """LMCache's allocator class, on our runtime and with small steps."""
    module: Any = importlib.import_module("lmcache.v1.memory_allocators.lazy_memory_allocator")
    cls = module.LazyMemoryAllocator
    module.current_device_spec = pinning
    cls.PIN_CHUNK_SIZE, cls.COMMIT_SIZE = (1 << 26) // KIB, (1 << 30) // KIB
    return cls


def settled(allocator: Any, pinning: Pinning) -> int:
    """What is pinned once the background thread has nothing more to do."""
    allocator._expand_thread.join()
    return pinning.bytes


def manager_of(allocator: Any) -> Any:
    """An L1MemoryManager over an allocator of ours."""
    from lmcache.v1.distributed.memory_manager import L1MemoryManager

    manager = L1MemoryManager.__new__(L1MemoryManager)
    manager._allocator = allocator
    return manager


def fill(allocator: Any, megabytes: int) -> list[Any]:
    """Objects of one MiB each."""
    import torch

    objects = allocator.batched_allocate([torch.Size([1 << 20])], [torch.uint8], megabytes)
    return objects or []


def stopped_before_growth(cls: Any, pinning: Pinning) -> dict[str, Any]:
    """The watermark while the background thread has not come far: L1 is 17 % full."""
    worker = cls._expand_worker
    cls._expand_worker = lambda self: None
    allocator = cls(INITIAL, FINAL, 4096)
    cls._expand_worker = worker
    kept = fill(allocator, 17)
    used, total = manager_of(allocator).get_memory_usage()
    allocator.batched_free(kept)
    allocator.close()
    return {"used": used, "total": total, "left_pinned": pinning.bytes}


def growth(cls: Any, pinning: Pinning) -> dict[str, Any]:
    allocator = cls(INITIAL, FINAL, 4096)
    at_rest = settled(allocator, pinning)
    kept = fill(allocator, 10)
    after_small = pinning.bytes
    kept += fill(allocator, 30)
    after_large = pinning.bytes
    used, total = manager_of(allocator).get_memory_usage()
    rest = fill(allocator, 60)
    full = pinning.bytes
    refused = fill(allocator, 1)
    allocator.batched_free(kept + rest)
    consistent = allocator.memcheck()
    allocator.close()
    return {
        "at_rest": at_rest,
        "after_small": after_small,
        "after_large": after_large,
        "usage": [used, total],
        "got": len(kept) + len(rest),
        "full": full,
        "refused": len(refused),
        "consistent": consistent,
        "left_pinned": pinning.bytes,
    }


def crowd(cls: Any, pinning: Pinning) -> dict[str, Any]:
    """Eight threads that all need what is not pinned yet."""
    allocator = cls(INITIAL, FINAL, 4096)
    allocator._expand_thread.join()
    kept: list[Any] = []
    barrier = threading.Barrier(8)

    def work() -> None:
        barrier.wait()
        for _ in range(10):
            kept.extend(fill(allocator, 1))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    spans = sorted((item.meta.address, item.meta.phy_size) for item in kept)
    overlaps = sum(start + size > later for (start, size), (later, _) in itertools.pairwise(spans))
    heap, pinned = allocator.get_address_manager().get_heap_size(), pinning.bytes
    allocator.batched_free(kept)
    allocator.close()
    return {"got": len(kept), "overlaps": overlaps, "heap": heap, "pinned": pinned}


def main() -> None:
    pinning = Pinning()
    cls = scaled(pinning)
    answer: dict[str, Any] = {
        "without": {"growth": growth(cls, pinning), "early": stopped_before_growth(cls, pinning)},
    }
    # 16 GiB, divided by 1024.
    os.environ[demand_pinned.STEP] = str(16 / KIB)
    demand_pinned.PATCH.apply()
    demand_pinned.PATCH.apply()
    answer["demand_alone"] = stopped_before_growth(cls, pinning)
    final_capacity.PATCH.apply()
    final_capacity.PATCH.apply()
    answer["with"] = {
        "growth": growth(cls, pinning),
        "early": stopped_before_growth(cls, pinning),
        "crowd": crowd(cls, pinning),
        "other_allocator": final_capacity._of_final_capacity(lambda _: (1, 2))(SimpleNamespace(_allocator=object())),
    }
    answer["effects"] = {"/".join(key): value for key, value in effects.totals().items()}
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
