"""What runs beside the engines of an srt-slurm recipe: a Mooncake store, LMCache servers, and what Dynamo needs.

In schema 1 the store is `backend.mooncake_kv_store`; in schema 2 it is an entry of `services`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pdserve.importing import environment
from pdserve.importing.flags import ImportedFlag, from_argv
from pdserve.importing.launch import Launch, Sourced
from pdserve.importing.sizes import gib
from pdserve.importing.tracked_tree import TrackedTree
from pdserve.recipe.load.problems import Path

_DYNAMO = ("etcd", "nats")
_LMCACHE = {
    "l1-size-gb": "l1_size_gb",
    "chunk-size": "chunk_size",
    "max-workers": "max_workers",
    "l1-read-ttl-seconds": "l1_read_ttl_seconds",
    "l1-init-size-gb": "l1_init_size_gb",
}
"""Flags of its server -> keys of the lmcache section."""
_MASTER_FILE: Mapping[str, Any] = {"metadata_server": "P2PHANDSHAKE", "mode": "embedded", "enable_offload": False}
"""Values of the store's file that pdserve writes too, or that are vLLM's defaults."""
_PROTOCOLS = ("rdma", "tcp")
_NO_DISKS = "vLLM 0.32 hands it to no store in mode embedded: no KV goes to disks, large loads are split"
"""vllm/distributed/mooncake_store.py: setup_mooncake_store does not pass it; store/worker.py takes from it the size of
its batches of loads, nothing else."""


def read(tracked: TrackedTree, launch: Launch, engines: Iterable[Path]) -> None:
    """The sections `mooncake_store` and `lmcache`. `engines`: where the file describes its engines."""
    for engine in engines:
        store = (*engine, "mooncake_kv_store")
        if not isinstance(tracked.tree.get(*store), dict):
            continue
        tracked.leave((*store, "container"), "the master runs in the engines' container", "replaced")
        launch.engine_env.update(environment.carried(tracked.mapping(*store, "env"), launch, None))
        if (lease := tracked.take(*store, "default_kv_lease_ttl_ms")) is not None:
            launch.store.setdefault("extra_args", {})["default_kv_lease_ttl"] = lease
        _store(tracked, launch, (*store, "store_config"), (*store, "master_extra_args"))
    services = tracked.tree.get("services")
    for index, service in enumerate(services if isinstance(services, list) else ()):
        if isinstance(service, dict):
            _service(tracked, launch, ("services", index), service)


def _service(tracked: TrackedTree, launch: Launch, path: Path, service: dict[str, Any]) -> None:
    kind = str(service.get("type", service.get("name", "generic")))
    for key in ("name", "type"):
        tracked.take(*path, key)
    if kind in _DYNAMO:
        tracked.leave(path, "a service of Dynamo", "unused")
    elif kind == "mooncake-master":
        tracked.leave((*path, "container"), "the master runs in the engines' container", "replaced")
        tracked.leave((*path, "placement"), "the master runs on the first node", "replaced")
        why = "a NIC for each GPU: here Mooncake chooses one of device_name for each rank; look that it is a near one"
        tracked.leave((*path, "options", "device_names_by_gpu"), why, "confirm")
        _store(tracked, launch, (*path, "options", "store_config"), (*path, "args"))
    elif kind == "lmcache-server":
        _lmcache(tracked, launch, path)
    else:
        tracked.leave(path, f"a recipe has no process of the type {kind}", "served")


def _store(tracked: TrackedTree, launch: Launch, config: Path, master: Path) -> None:
    values = tracked.mapping(*config)
    sizes = {"global_segment_size": "segment_gib", "local_buffer_size": "buffer_gib"}
    for key, at in values.items():
        if key in sizes:
            size = gib(at.value)
            if size is None:
                launch.note(at, "not a size that Mooncake reads", "served")
            else:
                launch.store[sizes[key]] = at.of(size)
        elif key == "protocol" and at.value not in _PROTOCOLS:
            why = f"the mooncake_store section knows {' and '.join(_PROTOCOLS)}; its default is used"
            launch.note(at, why, "served")
        elif key in ("protocol", "device_name"):
            launch.store[key] = at
        elif key == "enable_offload" and at.value is True and tracked.tree.get(*config, "mode") in (None, "embedded"):
            launch.note(at, _NO_DISKS, "replaced")
        elif key in _MASTER_FILE and at.value == _MASTER_FILE[key]:
            launch.note(at, "pdserve writes this file with the same value, or it is vLLM's default", "replaced")
        elif key == "master_server_address":
            launch.note(at, "pdserve writes the address of the first node", "replaced")
        else:
            launch.note(at, "the mooncake_store section has no such setting", "served")
    for at, item in _words(tracked, master):
        if isinstance(item, ImportedFlag):
            launch.store.setdefault("extra_args", {})[item.name.replace("-", "_")] = at.of(item.value)
        else:
            launch.note(at.of(item), "no flag of the store's master", "served")


def _lmcache(tracked: TrackedTree, launch: Launch, path: Path) -> None:
    words = _words(tracked, (*path, "args"))
    tracked.leave((*path, "placement"), "a server runs on each node of the roles that use it", "replaced")
    tracked.leave((*path, "env"), "the server gets the hash seed of the engines, and little else", "replaced")
    tracked.leave((*path, "preamble"), "limits are those of the agent; preflight checks memlock", "replaced")
    for at, item in words:
        if not isinstance(item, ImportedFlag):
            launch.note(at.of(item), "no flag of LMCache's server", "served")
        elif item.name in _LMCACHE:
            launch.lmcache[_LMCACHE[item.name]] = at.of(item.value)
        else:
            launch.lmcache.setdefault("extra_args", {})[item.name] = at.of(item.value)


def _words(tracked: TrackedTree, path: Path) -> list[tuple[Sourced, ImportedFlag | str]]:
    """The flags of a list of words, with their place."""
    at = tracked.take(*path)
    words = at.value if at is not None and isinstance(at.value, list) else []
    return [(at, item) for _, item in from_argv([str(word) for word in words])] if at is not None else []
