"""Files of LMCache's L2 that a failed store has left (lmcache#4991): none is loaded, and servers that stage apart leave
none. On LMCache's own adapters and storage manager."""

from __future__ import annotations

import asyncio
import errno
import tempfile
import threading
from pathlib import Path
from typing import Any

from tests.upstream.run import IN_RELEASE, INSTALLED_VLLM, on

SIZE, CONTENT = 1 << 16, 98
WITHIN_SECONDS = 60.0

if IN_RELEASE:
    import torch
    from lmcache.v1.distributed.api import GroupedObjectKeys, MemoryLayoutDesc, ObjectKey, PrefetchTaskSpec
    from lmcache.v1.distributed.config import (
        EvictionConfig,
        L1ManagerConfig,
        L1MemoryManagerConfig,
        StorageManagerConfig,
    )
    from lmcache.v1.distributed.l2_adapters import fs_l2_adapter
    from lmcache.v1.distributed.l2_adapters.config import L2AdaptersConfig, get_l2_adapter_config_class
    from lmcache.v1.distributed.storage_manager import StorageManager

    aiofiles = fs_l2_adapter.aiofiles
    LAYOUT = MemoryLayoutDesc(shapes=[torch.Size([SIZE])], dtypes=[torch.uint8])
    KEY = ObjectKey(chunk_hash=b"abcdefgh", model_name="model", kv_rank=0)


def manager(folder: Path, **adapter: Any) -> Any:
    """LMCache's storage of one server: L1 in memory and L2 in files."""
    config = get_l2_adapter_config_class("fs").from_dict({"type": "fs", "base_path": str(folder), **adapter})
    return StorageManager(
        StorageManagerConfig(
            l1_manager_config=L1ManagerConfig(
                memory_config=L1MemoryManagerConfig(size_in_bytes=64 << 20, use_lazy=False, shm_name="")
            ),
            eviction_config=EvictionConfig(eviction_policy="LRU"),
            l2_adapter_config=L2AdaptersConfig([config]),
        )
    )


def write(storage: Any) -> None:
    """Do what a store of an engine does: L1 takes it in, and gives it to L2."""
    (memory,) = storage.reserve_write([KEY], LAYOUT).values()
    memory.tensor.fill_(CONTENT)
    storage.finish_write([KEY])


def found(storage: Any) -> list[int]:
    """Return the bytes that an engine would be given after a lookup; none without a hit."""
    spec = PrefetchTaskSpec(key_groups=[GroupedObjectKeys(keys=[KEY], object_group_id=0, layout_desc=LAYOUT)])
    handle = storage.submit_prefetch_task(spec)
    assert storage.wait_prefetch_status(handle, WITHIN_SECONDS)
    keys = [KEY for _ in storage.query_prefetch_status(handle).hit_cells[0].get_indices_list()]
    _, memories = storage.unsafe_read(keys)
    contents = {value for memory in memories for value in memory.tensor.flatten().tolist()}
    storage.finish_read_prefetched(keys)
    return sorted(contents)


class Disk:
    """aiofiles, as LMCache's adapter sees it: the first file waits before its rename, the second one is written half
    and fails once the first has been renamed."""

    def __init__(self) -> None:
        self.written, self.half_written, self.renamed = threading.Event(), threading.Event(), threading.Event()
        self._open, self._replace = aiofiles.open, aiofiles.os.replace

    def __enter__(self) -> Disk:
        aiofiles.open, aiofiles.os.replace = self.open, self.replace
        return self

    def __exit__(self, *_: object) -> None:
        aiofiles.open, aiofiles.os.replace = self._open, self._replace

    def open(self, path: Any, mode: str = "r") -> Any:
        opened = self._open(path, mode)
        return _Half(self, opened) if mode == "wb" and self.written.is_set() else opened

    async def replace(self, *paths: Any) -> None:
        self.written.set()
        await _until(self.half_written)
        await self._replace(*paths)
        self.renamed.set()


class _Half:
    """An open file of which half can be written."""

    def __init__(self, disk: Disk, opened: Any) -> None:
        self._disk = disk
        self._opened = opened

    async def __aenter__(self) -> _Half:
        self._file = await self._opened.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._opened.__aexit__(*error)

    async def write(self, data: Any) -> None:
        await self._file.write(bytes(data)[: SIZE // 2])
        await self._file.flush()
        self._disk.half_written.set()
        await _until(self._disk.renamed)
        raise OSError(errno.ENOSPC, "No space left on device")


async def _until(event: threading.Event) -> None:
    assert await asyncio.get_running_loop().run_in_executor(None, event.wait, WITHIN_SECONDS)


def one_of_two_fails(folder: Path, *staging: dict[str, str]) -> tuple[list[int], list[int]]:
    """Let two servers store one key at the same time. `staging`: what each adapter is told beside the folder. Returns
    the sizes of files that are left, and what is found."""
    folder.mkdir()
    with Disk() as disk:
        servers = [manager(folder, **settings) for settings in staging]
        write(servers[0])
        assert disk.written.wait(WITHIN_SECONDS)
        failed = _end_of_a_store(servers[1])
        write(servers[1])
        assert failed.wait(WITHIN_SECONDS)
        for server in servers:
            server.close()
    third = manager(folder)
    contents = found(third)
    third.close()
    return [file.stat().st_size for file in folder.glob("*.data")], contents


def _end_of_a_store(storage: Any) -> threading.Event:
    """Set when its adapter has reported one."""
    (controller,) = storage._store_controllers.values()
    (adapter,) = controller._l2_adapters.values()
    ended, efd = threading.Event(), adapter._store_efd
    notify = efd.notify

    def notify_and_set() -> None:
        notify()
        ended.set()

    efd.notify = notify_and_set
    return ended


@on(INSTALLED_VLLM)
def test_a_cut_file_is_no_hit_and_servers_that_stage_apart_leave_none() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        apart = ({"relative_tmp_dir": ".staging-one"}, {"relative_tmp_dir": ".staging-two"})
        assert one_of_two_fails(folder / "together", {}, {}) == ([SIZE // 2], [])
        assert one_of_two_fails(folder / "apart", *apart) == ([SIZE], [CONTENT])
