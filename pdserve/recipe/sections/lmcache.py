"""The `lmcache:` section: the LMCache MP server that keeps KV in host memory beside its engines."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from pdserve.recipe.base import MOST_GIB, Count, EnvMap, Seconds, Strict
from pdserve.roles import EngineRole

TransferMode = Literal["auto", "lmcache_driven", "engine_driven"]


class Eviction(Strict):
    """When and how much L1 is emptied."""

    policy: Literal["LRU", "ARC", "IsolatedLRU", "noop"] = Field(
        default="LRU", description="The server has no default: it exits 1 without one."
    )
    watermark: float = Field(default=0.8, gt=0, le=1, description="Share of L1 in use at which eviction starts.")
    ratio: float = Field(default=0.2, gt=0, le=1, description="Share of the chunks in L1 that one eviction removes.")


class Lmcache(Strict):
    """One LMCache MP server a node (or a TP rank) that hosts an instance of a role in `on`."""

    on: list[EngineRole] = Field(
        default=["prefill"],
        min_length=1,
        description="Roles whose engines attach. Decode is opt-in: a decode-side lookup races the remote prefill "
        "load on lmcache < 0.5.5 and ran out of device memory at registration on MI300X.",
    )
    per: Literal["node", "tp-rank"] = Field(
        default="node",
        description="tp-rank: one server a TP rank (lmcache.mp.server_urls), because one Python server process is "
        "bound by its GIL; not with DP or PP.",
    )
    l1_size_gb: float = Field(
        gt=0,
        le=MOST_GIB,
        description="Host memory of one server, GiB. Required: the server has no default, and 0 starts a server "
        "that never stores anything. On CPU all of it is committed at start.",
    )
    l1_init_size_gb: float = Field(
        default=20,
        gt=0,
        le=MOST_GIB,
        description="Pinned at start on GPU hosts (LMCache's default 20); the rest is pinned in the background.",
    )
    l1_read_ttl_seconds: Count = Field(
        default=7200,
        description="Lease between lookup and retrieve. LMCache's 300 s is shorter than a long agentic queue: "
        "the object is then present but unreadable. Below 3600 a warning.",
    )
    l1_write_ttl_seconds: Count = Field(default=600, description="Lease of an unfinished store (LMCache's default).")
    chunk_size: Count = Field(default=256, description="Tokens a chunk; must be a multiple of the engine's block size.")
    max_workers: Count | None = Field(
        default=None,
        description="Transfer threads; null: the number of engine workers attached to the server. With LMCache's "
        "default of 1 the transfers of all ranks run one after another.",
    )
    eviction: Eviction = Field(default=Eviction(), description="What happens when L1 is full.")
    transfer_mode: TransferMode = Field(
        default="lmcache_driven",
        description="Which side moves the bytes. lmcache_driven: the server reads device memory by IPC (GPU). On "
        "CPU an engine asks for engine_driven, so use auto there.",
    )
    shm_name: str | None = Field(
        default=None,
        description="engine_driven only: put L1 in /dev/shm under this name, so that KV is not pickled. "
        "L1 then counts against free /dev/shm.",
    )
    l2: list[dict[str, Any]] = Field(
        default=[],
        description="L2 adapters, one mapping each (type: fs, resp, ...), passed as JSON. Of fs and fs_native each "
        "server keeps its unfinished files in a folder of its own (relative_tmp_dir), unless the mapping names one.",
    )
    mq_timeout_seconds: Seconds = Field(
        default=60,
        description="lmcache.mp.mq_timeout. LMCache's 300 s freezes an engine for minutes when the server dies. On "
        "ROCm registration waits while L1 is pinned: below one second for each GiB of it there is a warning.",
    )
    heartbeat_seconds: Seconds = Field(
        default=10, description="lmcache.mp.heartbeat_interval; three of them must stay within worker_reap_seconds."
    )
    worker_reap_seconds: float = Field(
        default=120, ge=30, description="The server forgets an engine that was silent for so long (LMCache: >= 30)."
    )
    on_death: Literal["restart", "fail"] = Field(
        default="restart",
        description="restart: its prefills leave routing, the server is restarted on the same port, and they "
        "return once they have registered again and passed a canary. fail: the deployment fails.",
    )
    env: EnvMap = Field(
        default={},
        description="Added to the server's allow-listed environment (its /env endpoint prints it: no secrets here).",
    )
    command: list[str] | None = Field(
        default=None,
        min_length=1,
        description="Replaces `python -m lmcache.v1.multiprocess.http_server`; the flags are appended.",
    )
    extra_args: dict[str, Any] = Field(default={}, description="Further server flags without the dashes.")
