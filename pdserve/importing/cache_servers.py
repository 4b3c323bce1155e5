"""LMCache's server, and a Mooncake store with its master, of another tool's launch become sections of a recipe."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from pdserve.importing.command_line import ImportedFlag
from pdserve.importing.launch import Effect, Launch, SourcedValue
from pdserve.recipe.flags import SERVER_FLAGS
from pdserve.recipe.rules.caches import MASTER_FLAGS

_LMCACHE: Mapping[str, tuple[str, ...]] = {
    "l1-size-gb": ("l1_size_gb",),
    "l1-init-size-gb": ("l1_init_size_gb",),
    "l1-read-ttl-seconds": ("l1_read_ttl_seconds",),
    "l1-write-ttl-seconds": ("l1_write_ttl_seconds",),
    "chunk-size": ("chunk_size",),
    "max-workers": ("max_workers",),
    "eviction-policy": ("eviction", "policy"),
    "eviction-trigger-watermark": ("eviction", "watermark"),
    "eviction-ratio": ("eviction", "ratio"),
    "supported-transfer-mode": ("transfer_mode",),
    "worker-reap-timeout-seconds": ("worker_reap_seconds",),
    "shm-name": ("shm_name",),
}
"""Flags of its server -> keys of the lmcache section."""
_L2 = "l2-adapter"
"""Given once for each level of storage, as a JSON object."""
_MASTERS_PLACE = ("rpc_port", "port", "metrics_port", "rpc_address", "rpc_interface", "metrics_host")
"""Flags of mooncake_master that pdserve sets and that only say where it is."""
_STORE_FILE: Mapping[str, Any] = {"metadata_server": "P2PHANDSHAKE", "mode": "embedded", "enable_offload": False}
"""Values of the store's file that pdserve writes too, or that are vLLM's defaults."""
_SIZES = {"global_segment_size": "segment_gib", "local_buffer_size": "buffer_gib"}
_PROTOCOLS = ("rdma", "tcp")
_NO_DISKS = "vLLM 0.32 hands it to no store in mode embedded: no KV goes to disks, large loads are split"
"""vllm/distributed/mooncake_store.py: setup_mooncake_store does not pass it; store/worker.py takes from it the size of
its batches of loads, nothing else."""

Words = Iterable[tuple[SourcedValue, ImportedFlag | str]]
"""Flags of a command line, each with its place; what belongs to no flag is a text."""


def read_lmcache(words: Words, launch: Launch) -> None:
    """Read the flags of LMCache's server into the section `lmcache`."""
    for at, item in words:
        if not isinstance(item, ImportedFlag):
            launch.note(at.of(item), "no flag of LMCache's server", "served")
        elif (path := _LMCACHE.get(item.name)) is not None:
            into = launch.lmcache
            for key in path[:-1]:
                into = into.setdefault(key, {})
            into[path[-1]] = at.of(item.value)
        elif item.name == _L2:
            _read_l2(at.of(item.value), launch)
        elif (owned := SERVER_FLAGS.get(item.name)) is not None and owned.condition is None:
            # What is left of them says where the server is and what it is called.
            launch.note(at.of(item.value), f"pdserve sets --{item.name}: {owned.instead}", "replaced")
        else:
            launch.lmcache.setdefault("extra_args", {})[item.name] = at.of(item.value)


def _read_l2(at: SourcedValue, launch: Launch) -> None:
    if isinstance(at.value, dict):
        launch.lmcache.setdefault("l2", []).append(at)
    else:
        launch.note(at, f"--{_L2} is no JSON object", "served")


def read_store_file(values: Mapping[str, SourcedValue], launch: Launch) -> None:
    """Read the file that engines have of a store (MOONCAKE_CONFIG_PATH) into the section `mooncake_store`."""
    embedded = "mode" not in values or values["mode"].value in (None, "embedded")
    for key, at in values.items():
        if key in _SIZES:
            size = gib(at.value)
            if size is None:
                launch.note(at, "not a size that Mooncake reads", "served")
            else:
                launch.store[_SIZES[key]] = at.of(size)
        elif key == "protocol" and at.value not in _PROTOCOLS:
            why = f"the mooncake_store section knows {' and '.join(_PROTOCOLS)}; its default is used"
            launch.note(at, why, "served")
        elif key == "device_name" and str(at.value).startswith("$"):
            why = "a variable of its site: without mooncake_store.device_name Mooncake chooses a NIC for each rank"
            launch.note(at, why, "confirm")
        elif key in ("protocol", "device_name"):
            launch.store[key] = at
        elif key == "enable_offload" and at.value is True and embedded:
            launch.note(at, _NO_DISKS, "replaced")
        elif key in _STORE_FILE and at.value == _STORE_FILE[key]:
            launch.note(at, "pdserve writes this file with the same value, or it is vLLM's default", "replaced")
        elif key == "master_server_address":
            launch.note(at, "pdserve writes the address of the first node", "replaced")
        else:
            launch.note(at, "the mooncake_store section has no such setting", "served")


def read_master(words: Words, launch: Launch) -> None:
    """Read the flags of mooncake_master into `extra_args` of the section `mooncake_store`."""
    for at, item in words:
        if not isinstance(item, ImportedFlag):
            launch.note(at.of(item), "no flag of the store's master", "served")
            continue
        name = item.name.replace("-", "_")
        if name in MASTER_FLAGS:
            effect: Effect = "replaced" if name in _MASTERS_PLACE else "served"
            launch.note(at.of(item.value), f"pdserve sets -{name}: {MASTER_FLAGS[name]}", effect)
        else:
            launch.store.setdefault("extra_args", {})[name] = at.of(item.value)


_SIZE = re.compile(r"\s*([0-9]*\.?[0-9]+)\s*([kmgt]?)b?\s*", re.IGNORECASE)
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def gib(value: object) -> int | float | None:
    """Return the size in GiB; None for what is no size."""
    match = _SIZE.fullmatch(str(value))
    if match is None or isinstance(value, bool):
        return None
    number = float(match.group(1)) * _UNITS[match.group(2).lower()] / (1 << 30)
    return int(number) if number == int(number) else number
