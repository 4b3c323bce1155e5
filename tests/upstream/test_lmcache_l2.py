"""Files of LMCache's L2 (lmcache#4991): one that is cut is no hit, and an unfinished one is where the plan wants it,
apart from those of other servers. On LMCache's own adapter and storage manager."""

from __future__ import annotations

import tempfile
import threading
from pathlib import Path
from typing import Any
from unittest import mock

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


def found_by_another(folder: Path) -> list[int]:
    """Return the bytes that an engine would be given after a lookup by another server; none without a hit."""
    storage = manager(folder)
    spec = PrefetchTaskSpec(key_groups=[GroupedObjectKeys(keys=[KEY], object_group_id=0, layout_desc=LAYOUT)])
    handle = storage.submit_prefetch_task(spec)
    assert storage.wait_prefetch_status(handle, WITHIN_SECONDS)
    keys = [KEY for _ in storage.query_prefetch_status(handle).hit_cells[0].get_indices_list()]
    _, memories = storage.unsafe_read(keys)
    contents = {value for memory in memories for value in memory.tensor.flatten().tolist()}
    storage.finish_read_prefetched(keys)
    storage.close()
    return sorted(contents)


@on(INSTALLED_VLLM)
def test_a_cut_file_is_no_hit_and_unfinished_ones_are_where_the_plan_wants_them() -> None:
    files, renamed, staged = fs_l2_adapter.aiofiles.os, threading.Event(), list[Path]()
    rename = files.replace

    async def replace(source: Any, target: Any) -> None:
        await rename(source, target)
        staged.append(Path(source))
        renamed.set()

    with tempfile.TemporaryDirectory() as name, mock.patch.object(files, "replace", replace):
        folder = Path(name)
        storing = manager(folder, relative_tmp_dir=".staging-one")
        write(storing)
        assert renamed.wait(WITHIN_SECONDS)
        storing.close()
        assert [path.parent for path in staged] == [folder / ".staging-one"]
        assert found_by_another(folder) == [CONTENT]
        (file,) = folder.glob("*.data")
        file.write_bytes(file.read_bytes()[: SIZE // 2])
        assert found_by_another(folder) == []
