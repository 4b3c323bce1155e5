"""Files of LMCache's L2 that a failed store has left (lmcache#4991): none is loaded, and servers that stage apart leave
none. On LMCache's own adapters and storage manager."""

from __future__ import annotations

import asyncio
import errno
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from tests.upstream.run import IN_RELEASE, INSTALLED_VLLM, on

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
    LAYOUT = MemoryLayoutDesc(shapes=[torch.Size([1 << 16])], dtypes=[torch.uint8])
    KEY = ObjectKey(chunk_hash=b"abcdefgh", model_name="model", kv_rank=0)
    NEXT = ObjectKey(chunk_hash=b"ijklmnop", model_name="model", kv_rank=0)

SIZE = 1 << 16
WITHIN_SECONDS = 60.0


def manager(kind: str, folder: Path, **adapter: Any) -> Any:
    """LMCache's storage of one server: L1 in memory and one adapter of that type."""
    config = get_l2_adapter_config_class(kind).from_dict({"type": kind, "base_path": str(folder), **adapter})
    return StorageManager(
        StorageManagerConfig(
            l1_manager_config=L1ManagerConfig(
                memory_config=L1MemoryManagerConfig(size_in_bytes=64 << 20, use_lazy=False, shm_name="")
            ),
            eviction_config=EvictionConfig(eviction_policy="LRU"),
            l2_adapter_config=L2AdaptersConfig([config]),
        )
    )


def write(storage: Any, *keys: Any) -> None:
    """What a store of an engine does: L1 takes it in, and gives it to L2."""
    for key, memory in storage.reserve_write(list(keys), LAYOUT).items():
        memory.tensor.fill_(_content(key))
    storage.finish_write(list(keys))


def _content(key: Any) -> int:
    return 1 + int(key.chunk_hash[0]) % 200


def hits(storage: Any, *keys: Any) -> list[list[int]]:
    """Of a lookup by an engine: how many keys it is told of, and the bytes that it would then be given."""
    spec = PrefetchTaskSpec(key_groups=[GroupedObjectKeys(keys=list(keys), object_group_id=0, layout_desc=LAYOUT)])
    handle = storage.submit_prefetch_task(spec)
    assert storage.wait_prefetch_status(handle, WITHIN_SECONDS)
    result = storage.query_prefetch_status(handle)
    hit_keys = [keys[at] for at in result.hit_cells[0].get_indices_list()]
    _, memories = storage.unsafe_read(hit_keys)
    contents = [sorted(set(memory.tensor.flatten().tolist())) for memory in memories]
    storage.finish_read_prefetched(hit_keys)
    return contents


def stored(folder: Path, count: int) -> list[int]:
    """Sizes of the files of L2 once there are so many."""
    deadline = time.monotonic() + WITHIN_SECONDS
    while len(files := sorted(folder.glob("*.data"))) < count:
        assert time.monotonic() < deadline, list(folder.iterdir())
        time.sleep(0.02)
    return [file.stat().st_size for file in files]


def cut_file(kind: str, folder: Path) -> None:
    """A cut file is no hit, and its bytes reach no request. Until lmcache 0.5.5 the memory of a load that had failed
    could become readable (lmcache#5032). Nor is it ever repaired: a store of a key whose file is there is done at once;
    the reason not to make such files."""
    folder.mkdir()
    first = manager(kind, folder)
    write(first, KEY, NEXT)
    assert stored(folder, 2) == [SIZE] * 2
    first.close()
    (cut,) = (file for file in folder.glob("*.data") if NEXT.chunk_hash.hex() in file.name)
    with cut.open("r+b") as file:
        file.truncate(SIZE // 2)
    second = manager(kind, folder)
    assert hits(second, KEY, NEXT) == [[_content(KEY)]]
    write(second, NEXT)
    assert hits(second, KEY, NEXT) == [[_content(KEY)], [_content(NEXT)]], "L1 has it again"
    second.close()
    assert cut.stat().st_size == SIZE // 2


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


def one_of_two_fails(folder: Path, *staging: dict[str, str]) -> tuple[list[int], list[list[int]]]:
    """Two servers store one key at the same time. `staging`: what each adapter is told beside the folder. The sizes of
    files that are left, and what is found."""
    folder.mkdir()
    with Disk() as disk:
        servers = [manager("fs", folder, **settings) for settings in staging]
        write(servers[0], KEY)
        assert disk.written.wait(WITHIN_SECONDS)
        failed = _end_of_a_store(servers[1])
        write(servers[1], KEY)
        assert failed.wait(WITHIN_SECONDS)
        for server in servers:
            server.close()
    third = manager("fs", folder)
    contents = hits(third, KEY)
    third.close()
    return stored(folder, 1), contents


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
        for kind in ("fs", "fs_native"):
            cut_file(kind, folder / kind)
        apart = ({"relative_tmp_dir": ".staging-one"}, {"relative_tmp_dir": ".staging-two"})
        assert one_of_two_fails(folder / "together", {}, {}) == ([SIZE // 2], [])
        assert one_of_two_fails(folder / "apart", *apart) == ([SIZE], [[_content(KEY)]])
