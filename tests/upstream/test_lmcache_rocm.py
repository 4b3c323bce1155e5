"""lmcache-host-events on LMCache's own event backend: nothing of another process is opened, and the order is kept.

The device is made up: an event has happened once it was waited for, and an event of another process cannot be opened.
The backend and the future are LMCache's.

LMCache's L1 on a large host: what is pinned, and at which share of it eviction begins.

LMCache's growing allocator on a scaled-down L1: sizes are upstream's, divided by 1024. Pinning needs a device runtime;
a recorder stands in for it. On the installed LMCache: no release has growth on demand.
"""

from __future__ import annotations

import importlib
import itertools
import os
import threading
from typing import Any

from pdserve.patches.lmcache import host_events, host_memory
from tests.upstream.run import IN_RELEASE, INSTALLED_VLLM, count, on

if IN_RELEASE:
    import torch
    from lmcache.v1.distributed.memory_manager import L1MemoryManager
    from lmcache.v1.multiprocess.futures import DeviceMessagingFuture, MessagingFuture
    from lmcache.v1.platform.base.event_ipc import DefaultEventIPCBackend


WITHIN_SECONDS = 60.0


class Hang(Exception):  # noqa: N818  # no error: what would go on for ever
    """A process opens an event of another one."""


class Event:
    """Of one process, recorded on a stream with work on it that is done when it is waited for. `interprocess` events
    have handles, but opening one never returns."""

    def __init__(self, interprocess: bool = False) -> None:
        self.done = True

    def record(self, stream: object) -> None:
        self.done = False

    def ipc_handle(self) -> bytes:
        return bytes(64)

    @classmethod
    def from_ipc_handle(cls, device: object, handle: bytes) -> Event:
        raise Hang

    def wait(self, stream: object) -> None:
        raise AssertionError("an event of the own process is waited for on a stream")

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        self.done = True


class Device:
    """In place of torch.cuda."""

    Event = Event


def exported(backend: Any) -> dict[str, Any]:
    """Return what one side sends of a stream with work on it, and what the other makes of that."""
    event = Event(interprocess=True)
    backend.record_event(event, object())
    handle = backend.export_event(event, "gpu")
    try:
        opened = backend.import_event(handle, "gpu")
        backend.wait_event(opened, object())
        backend.synchronize_event(opened, "gpu")
        seen = "complete" if backend.query_event(opened) else "pending"
    except Hang:
        seen = "hangs"
    return {"sent_before_the_work_was_done": not event.done, "the_other_side": seen}


def answered(backend: Any, handle: bytes) -> Any:
    """An engine's future, once the server has answered."""
    raw: Any = MessagingFuture()
    future = DeviceMessagingFuture(raw, "gpu", backend)
    before = future.query()
    raw.set_result((handle, True))
    try:
        return [before, future.query(), future.wait(WITHIN_SECONDS), future.result(WITHIN_SECONDS)]
    except Hang:
        return "hangs"


def look() -> dict[str, Any]:
    backend = DefaultEventIPCBackend(Device(), "gpu")
    return {
        "work is pending": exported(backend),
        "a future": answered(backend, backend.export_event(Event(), "gpu")),
        "a future without work": answered(backend, b""),
        "an unpatched other side": answered(backend, bytes(64)),
    }


@on(INSTALLED_VLLM)
def test_what_is_sent_is_done_with_the_patch_and_has_to_be_opened_without() -> None:
    """A handle of a side without the patch is opened as ever: it is no mark; the plan gives the patch to both sides."""
    unpatched = look()
    assert unpatched["work is pending"] == {"sent_before_the_work_was_done": True, "the_other_side": "hangs"}
    assert unpatched["a future"] == "hangs"
    host_events.SERVER.apply()
    host_events.SERVER.apply()
    complete = {"sent_before_the_work_was_done": False, "the_other_side": "complete"}
    assert look() == {
        "work is pending": complete,
        "a future": [False, True, True, True],
        "a future without work": unpatched["a future without work"],
        "an unpatched other side": "hangs",
    }
    assert count(host_events.SERVER.name, host_events.AWAITED) == 2, "each wait once"


KIB, MIB = 1 << 10, 1 << 20
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


def manager_of(allocator: Any) -> Any:
    """An L1MemoryManager over an allocator of ours."""
    manager = L1MemoryManager.__new__(L1MemoryManager)
    manager._allocator = allocator
    return manager


def fill(allocator: Any, megabytes: int) -> list[Any]:
    """Objects of one MiB each."""
    objects = allocator.batched_allocate([torch.Size([1 << 20])], [torch.uint8], megabytes)
    return objects or []


def total_before_growth(cls: Any) -> int:
    """Of which eviction takes its share, while the background thread has not come far: L1 is 17 % full."""
    worker = cls._expand_worker
    cls._expand_worker = lambda self: None
    allocator = cls(INITIAL, FINAL, 4096)
    cls._expand_worker = worker
    kept = fill(allocator, 17)
    used, total = manager_of(allocator).get_memory_usage()
    allocator.batched_free(kept)
    allocator.close()
    assert used == 17 * MIB
    return int(total)


def growth(cls: Any, pinning: Pinning) -> tuple[int, int, int]:
    """Return what is pinned when nothing is stored, a little, and 40 MiB."""
    allocator = cls(INITIAL, FINAL, 4096)
    allocator._expand_thread.join()
    at_rest = pinning.bytes
    kept = fill(allocator, 10)
    after_small = pinning.bytes
    kept += fill(allocator, 30)
    after_large = pinning.bytes
    rest = fill(allocator, 60)
    full = pinning.bytes
    refused = fill(allocator, 1)
    allocator.batched_free(kept + rest)
    assert allocator.memcheck()
    allocator.close()
    # The same capacity, refused at the same point, and all of it given back.
    assert (full, len(kept) + len(rest), refused, pinning.bytes) == (FINAL, FINAL // MIB, [], 0)
    return at_rest, after_small, after_large


def crowd(cls: Any, pinning: Pinning) -> None:
    """Eight threads that all need what is not pinned yet: each byte is had once."""
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
    assert (len(kept), overlaps) == (80, 0)
    assert allocator.get_address_manager().get_heap_size() == pinning.bytes < FINAL
    allocator.batched_free(kept)
    allocator.close()


@on(INSTALLED_VLLM)
def test_upstream_pins_all_of_l1_and_ours_only_what_is_used_and_eviction_looks_at_the_final_size() -> None:
    """17 % full, upstream is above its watermark. Growth on demand alone would evict for ever instead of growing."""
    pinning = Pinning()
    cls = scaled(pinning)
    assert growth(cls, pinning)[0] == FINAL
    assert 17 * MIB / total_before_growth(cls) > 0.8
    os.environ[host_memory.STEP] = str(16 / KIB)  # 16 GiB, divided by 1024
    host_memory.DEMAND_PINNED.apply()
    host_memory.DEMAND_PINNED.apply()
    assert total_before_growth(cls) == INITIAL
    host_memory.FINAL_CAPACITY.apply()
    host_memory.FINAL_CAPACITY.apply()
    at_rest, after_small, after_large = growth(cls, pinning)
    assert at_rest == after_small == INITIAL
    assert 40 * MIB <= after_large <= 60 * MIB
    assert total_before_growth(cls) == FINAL
    crowd(cls, pinning)
    assert count("lmcache-demand-pinned", "expansions") > 0
