"""Flags of an LMCache MP server (lmcache 0.5.6) that pdserve sets itself, and what to write instead of them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pdserve.recipe.owned import Condition, Each, OwnedFlag
from pdserve.recipe.sections.lmcache import Lmcache

LOOPBACK = "127.0.0.1"
"""A server serves its own node only. Neither requests nor HTTP are authenticated, and /env prints the environment."""
_STAGING = frozenset({"fs", "fs_native"})
"""L2 adapters that write a file under another name and rename it."""


@dataclass(frozen=True, kw_only=True)
class ServerLine:
    """What the flags of a server depend on."""

    section: Lmcache
    instance_id: str
    staging: str
    """A name that no other server of the deployment has; folders of it are below L2's."""
    port: int
    http_port: int
    threads: int
    """For transfers, unless the recipe sets another number."""
    on_cpu: bool


def number(value: float) -> str:
    """1 rather than 1.0: both parse, one reads better."""
    return str(int(value)) if value == int(value) else str(value)


def _initial_l1(line: ServerLine) -> str | None:
    if line.on_cpu:
        return None
    return str(max(1, math.floor(min(line.section.l1_init_size_gb, line.section.l1_size_gb))))


def _staged(adapter: Mapping[str, Any], staging: str) -> dict[str, Any]:
    """An adapter whose unfinished files are its server's own. LMCache names such a file after its key: when two servers
    store one key at the same time, the one that fails leaves a cut file under the final name, which lookups find for
    ever and no load can read (lmcache#4991)."""
    if adapter.get("type") not in _STAGING:
        return dict(adapter)
    return {"relative_tmp_dir": f".staging-{staging}", **adapter}


SERVER_FLAGS: dict[str, OwnedFlag[ServerLine]] = {
    "instance-id": OwnedFlag("pdserve knows its own server from a stale one by it", lambda line: line.instance_id),
    "host": OwnedFlag("the server listens on loopback of its node", lambda line: LOOPBACK),
    "port": OwnedFlag("set ports.lmcache", lambda line: line.port),
    "http-host": OwnedFlag("its HTTP API has no authentication and stays on loopback", lambda line: LOOPBACK),
    "http-port": OwnedFlag("set ports.lmcache_http", lambda line: line.http_port),
    "l1-size-gb": OwnedFlag("set lmcache.l1_size_gb", lambda line: number(line.section.l1_size_gb)),
    # Nothing is pinned on a CPU, so the server would turn lazy growth off itself, with a warning.
    "l1-use-lazy": OwnedFlag(
        "remove it",
        lambda line: False if line.on_cpu else None,
        Condition("for a CPU", lambda recipe, _: recipe.platform == "cpu", lambda _: ("platform",)),
    ),
    "l1-init-size-gb": OwnedFlag("set lmcache.l1_init_size_gb", _initial_l1),
    "l1-read-ttl-seconds": OwnedFlag("set lmcache.l1_read_ttl_seconds", lambda line: line.section.l1_read_ttl_seconds),
    "l1-write-ttl-seconds": OwnedFlag(
        "set lmcache.l1_write_ttl_seconds", lambda line: line.section.l1_write_ttl_seconds
    ),
    "chunk-size": OwnedFlag("set lmcache.chunk_size", lambda line: line.section.chunk_size),
    "max-workers": OwnedFlag("set lmcache.max_workers", lambda line: line.section.max_workers or line.threads),
    "eviction-policy": OwnedFlag("set lmcache.eviction.policy", lambda line: line.section.eviction.policy),
    "eviction-trigger-watermark": OwnedFlag(
        "set lmcache.eviction.watermark", lambda line: number(line.section.eviction.watermark)
    ),
    "eviction-ratio": OwnedFlag("set lmcache.eviction.ratio", lambda line: number(line.section.eviction.ratio)),
    "supported-transfer-mode": OwnedFlag("set lmcache.transfer_mode", lambda line: line.section.transfer_mode),
    "worker-reap-timeout-seconds": OwnedFlag(
        "set lmcache.worker_reap_seconds", lambda line: number(line.section.worker_reap_seconds)
    ),
    "shm-name": OwnedFlag("set lmcache.shm_name", lambda line: line.section.shm_name),
    "l2-adapter": OwnedFlag(
        "set lmcache.l2",
        lambda line: Each(tuple(json.dumps(_staged(adapter, line.staging)) for adapter in line.section.l2)),
    ),
}
