"""A store to L2 that fails beside another of its key, and a cut file: on LMCache's own adapters and storage manager.

`python -m ... FOLDER`: an empty one.
"""

from __future__ import annotations

import asyncio
import errno
import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

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

SIZE = 1 << 16
LAYOUT = MemoryLayoutDesc(shapes=[torch.Size([SIZE])], dtypes=[torch.uint8])
KEY = ObjectKey(chunk_hash=b"abcdefgh", model_name="model", kv_rank=0)
NEXT = ObjectKey(chunk_hash=b"ijklmnop", model_name="model", kv_rank=0)
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


def write(storage: Any, *keys: ObjectKey) -> None:
    """What a store of an engine does: L1 takes it in, and gives it to L2."""
    for key, memory in storage.reserve_write(list(keys), LAYOUT).items():
        memory.tensor.fill_(_content(key))
    storage.finish_write(list(keys))


def _content(key: ObjectKey) -> int:
    return 1 + int(key.chunk_hash[0]) % 200


def hits(storage: Any, *keys: ObjectKey) -> list[list[int]]:
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


def data_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.data"))


def stored(folder: Path, count: int) -> list[int]:
    """Sizes of the files of L2 once there are so many."""
    deadline = time.monotonic() + WITHIN_SECONDS
    while len(files := data_files(folder)) < count:
        assert time.monotonic() < deadline, list(folder.iterdir())
        time.sleep(0.02)
    return [file.stat().st_size for file in files]


def a_cut_file(kind: str, folder: Path) -> dict[str, Any]:
    """What a lookup finds when one of two files is cut, before and after the key is stored once more."""
    folder.mkdir()
    first = manager(kind, folder)
    write(first, KEY, NEXT)
    whole = stored(folder, 2)
    first.close()
    (cut,) = (file for file in data_files(folder) if NEXT.chunk_hash.hex() in file.name)
    with cut.open("r+b") as file:
        file.truncate(SIZE // 2)
    second = manager(kind, folder)
    before = hits(second, KEY, NEXT)
    write(second, NEXT)
    again = hits(second, KEY, NEXT)
    second.close()
    return {"whole": whole, "found": before, "found_after_a_store": again, "size": cut.stat().st_size}


aiofiles = fs_l2_adapter.aiofiles


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


def one_of_two_fails(folder: Path, *staging: dict[str, str]) -> dict[str, Any]:
    """Two servers store one key at the same time. `staging`: what each adapter is told beside the folder."""
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
    return {"sizes": stored(folder, 1), "found": contents}


def _end_of_a_store(storage: Any) -> threading.Event:
    """Set when its adapter has reported one."""
    ended, efd = threading.Event(), _adapter(storage)._store_efd
    notify = efd.notify

    def notify_and_set() -> None:
        notify()
        ended.set()

    efd.notify = notify_and_set
    return ended


def _adapter(storage: Any) -> Any:
    (controller,) = storage._store_controllers.values()
    (adapter,) = controller._l2_adapters.values()
    return adapter


def main() -> None:
    folder = Path(sys.argv[1])
    results = {f"cut/{kind}": a_cut_file(kind, folder / kind) for kind in ("fs", "fs_native")}
    apart = ({"relative_tmp_dir": ".staging-one"}, {"relative_tmp_dir": ".staging-two"})
    results["staged together"] = one_of_two_fails(folder / "together", {}, {})
    results["staged apart"] = one_of_two_fails(folder / "apart", *apart)
    print(json.dumps(results | {"contents": [_content(KEY), _content(NEXT)], "size": SIZE}))


if __name__ == "__main__":
    main()
