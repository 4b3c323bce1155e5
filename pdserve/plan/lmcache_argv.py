"""The exact command line of an LMCache MP server (lmcache 0.5.6). It serves its own node only: loopback."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from pdserve.plan.server_patching import SERVER_MAIN
from pdserve.plan.vllm_argv import flags
from pdserve.recipe.lmcache import Lmcache

HOST = "127.0.0.1"
"""Requests and HTTP alike have no authentication, and /env prints the environment."""


_STAGING = frozenset({"fs", "fs_native"})
"""L2 adapters that write a file under another name and rename it."""


def lmcache_argv(
    section: Lmcache,
    *,
    instance_id: str,
    staging: str,
    port: int,
    http_port: int,
    workers: int,
    on_cpu: bool,
    python: str,
    patched: bool = False,
) -> tuple[str, ...]:
    """`workers`: engine workers that will attach; each gets a transfer thread unless the recipe says otherwise.
    `staging`: a name that no other server of the deployment has; folders of it below L2's. `patched`: the server is
    started through the main that loads patches."""
    module = SERVER_MAIN if patched else "lmcache.v1.multiprocess.http_server"
    program = section.command if section.command is not None else [python, "-m", module]
    argv = [*program, "--instance-id", instance_id]
    argv += ["--host", HOST, "--port", str(port), "--http-host", HOST, "--http-port", str(http_port)]
    argv += ["--l1-size-gb", _number(section.l1_size_gb)]
    if on_cpu:
        # Nothing is pinned on a CPU, so the server would turn lazy growth off itself, with a warning.
        argv.append("--no-l1-use-lazy")
    else:
        argv += ["--l1-init-size-gb", str(max(1, math.floor(min(section.l1_init_size_gb, section.l1_size_gb))))]
    argv += ["--l1-read-ttl-seconds", str(section.l1_read_ttl_seconds)]
    argv += ["--l1-write-ttl-seconds", str(section.l1_write_ttl_seconds)]
    argv += ["--chunk-size", str(section.chunk_size), "--max-workers", str(section.max_workers or workers)]
    argv += ["--eviction-policy", section.eviction.policy]
    argv += ["--eviction-trigger-watermark", _number(section.eviction.watermark)]
    argv += ["--eviction-ratio", _number(section.eviction.ratio)]
    argv += ["--supported-transfer-mode", section.transfer_mode]
    argv += ["--worker-reap-timeout-seconds", _number(section.worker_reap_seconds)]
    if section.shm_name is not None:
        argv += ["--shm-name", section.shm_name]
    for adapter in section.l2:
        argv += ["--l2-adapter", json.dumps(_staged(adapter, staging))]
    return (*argv, *flags(section.extra_args))


def _staged(adapter: Mapping[str, Any], staging: str) -> dict[str, Any]:
    """An adapter whose unfinished files are its server's own. LMCache names such a file after its key: when two servers
    store one key at the same time, the one that fails leaves a cut file under the final name, which lookups find for
    ever and no load can read (lmcache#4991)."""
    if adapter.get("type") not in _STAGING:
        return dict(adapter)
    return {"relative_tmp_dir": f".staging-{staging}", **adapter}


def _number(value: float) -> str:
    """1 rather than 1.0: both parse, one reads better."""
    return str(int(value)) if value == int(value) else str(value)
