"""The sections of a recipe that stand alone; `model.py` puts them together. It imports no connector, so that a node's
agent, which reads plans, stays small."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from pdserve.recipe.base import MOST_GIB, Count, EnvMap, Seconds, Strict
from pdserve.roles import EngineRole

SetupCommand = str | list[str]
"""Text is split into words as a shell splits it, and that is all: no shell runs it. A list is its words."""


def words_of(command: str | Sequence[str]) -> tuple[str, ...]:
    """Its argument list. ValueError: a quote that is not closed."""
    return tuple(shlex.split(command) if isinstance(command, str) else command)


class Timeouts(Strict):
    """Limits of how long a stage may take. Death always ends a wait at once; these end the wait for a live process."""

    setup_seconds: Seconds = Field(default=600, description="One command of the setup on one node.")
    weights_seconds: Seconds = Field(
        default=21600,
        description="The download of the weights on one node. One that does not move for ten minutes ends before.",
    )
    container_seconds: Seconds = Field(
        default=7200,
        description="The image of the container on one node, or the file of it that all nodes share: tens of GB are "
        "fetched and unpacked.",
    )
    lmcache_seconds: Seconds = Field(
        default=240, description="LMCache until healthy: 4-9 s seen, pinning takes longer."
    )
    store_master_seconds: Seconds = Field(
        default=60, description="The master of a Mooncake store until healthy; it needs about a second."
    )
    engine_seconds: Seconds = Field(default=3600, description="An engine until healthy: 1.7 TB of weights take 30 min.")
    proxy_seconds: Seconds = Field(default=30, description="The proxy until healthy; it needs about a second.")
    attach_seconds: Seconds = Field(
        default=60,
        description="Engines, once healthy, until registered at LMCache, or until a Mooncake store has their memory.",
    )
    unresponsive_seconds: Seconds = Field(
        default=60,
        description="A process that was ready and does not answer leaves routing at once, and is treated as dead after "
        "so long; while others are started, it ends that start.",
    )
    canary_seconds: Seconds = Field(
        default=120,
        description="One token through the proxy; of an engine that is started again, alone and with all its peers.",
    )
    stop_seconds: Seconds = Field(default=30, description="From TERM to KILL, for each process.")
    transfer_abort_seconds: Count = Field(
        default=60,
        description="VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT: how long prefill keeps KV that no decode fetches and decode "
        "waits for KV that never comes. vLLM's 480 s holds the blocks of every lost request for 8 minutes.",
    )
    heartbeat_seconds: Seconds = Field(
        default=5, description="An agent, and with it its node, is lost once it was not heard for so long."
    )
    agent_lease_seconds: Seconds = Field(
        default=15,
        description="An agent that hears nothing from the launcher for so long stops its processes by itself: a cut "
        "cable ends no connection. Not less than heartbeat_seconds.",
    )


class RestartPolicy(Strict):
    """The reaction when one instance of a role dies while others serve."""

    policy: Literal["never", "on-failure"] = Field(
        default="on-failure",
        description="on-failure: a dead instance is started again, with back-off; once `max` restarts within "
        "`window_seconds` did not help, it stays dead. never: it stays dead at once, and `pdserve restart` revives it. "
        "A dead instance makes the deployment degraded; the last one of its role ends it.",
    )
    max: Count = Field(default=3, description="Restarts of one process within `window_seconds` before it stays dead.")
    window_seconds: Seconds = Field(default=600, description="Restarts that are longer ago do not count.")
    backoff_seconds: Seconds = Field(default=2, description="Before the first restart; doubles each time.")
    backoff_max_seconds: Seconds = Field(default=60, description="The longest pause between two restarts.")


TransferMode = Literal["auto", "lmcache_driven", "engine_driven"]


class Eviction(Strict):
    """The eviction from L1: when, and how much."""

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


class MooncakeStore(Strict):
    """A Mooncake store: each engine worker gives memory to the pool, and one master (`mooncake_master`) knows what is
    where."""

    segment_gib: float = Field(
        gt=0,
        le=MOST_GIB,
        description="Host memory that each engine worker gives to the pool, GiB (global_segment_size). All of it is "
        "committed at start, and its content is lost with the engine.",
    )
    buffer_gib: float = Field(
        default=4,
        gt=0,
        le=MOST_GIB,
        description="Host memory of each engine worker for transfers, GiB (local_buffer_size; vLLM's default 4).",
    )
    protocol: Literal["rdma", "tcp"] = Field(
        default="rdma",
        description="Transport of all engines of the pool. rdma is vLLM's default; tcp works everywhere.",
    )
    device_name: str = Field(
        default="",
        description="RDMA devices of each node, comma separated, which preflight looks for there; empty lets Mooncake "
        "choose.",
    )
    on_death: Literal["restart", "fail"] = Field(
        default="restart",
        description="What follows when the master dies. restart: it is started again on its ports; until then a "
        "prompt waits 4 s for its lookup and is then computed, and what the pool held is lost. fail: the deployment "
        "fails.",
    )
    command: list[str] | None = Field(
        default=None, min_length=1, description="Replaces `python -m mooncake.cli`; the flags are appended."
    )
    extra_args: dict[str, bool | int | float | str] = Field(
        default={}, description="Further flags of mooncake_master, without the dashes: eviction_ratio: 0.1."
    )


OnNodeLoss = Literal["fail", "degrade"]


class Fabric(Strict):
    """The fabric check: a real transfer for each pair of nodes that will move KV, before anything starts."""

    check: bool = Field(
        default=True,
        description="Whether `up` over several nodes makes the check. It takes seconds. Mooncake and "
        "NIXL over UCX are tried, other connectors are not. `pdserve preflight RECIPE --fabric` makes it in any case.",
    )
    min_gbps: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = Field(
        default=None,
        description="10^9 bits a second that each pair must reach, with one sender; null: any rate.",
    )


class Network(Strict):
    """The network on which engines, LMCache and the proxy reach each other. Exactly one of `interface` and `cidr`."""

    interface: str | None = Field(
        default=None, description="Name of the network interface (eth0, ib0), the same on every node."
    )
    cidr: str | None = Field(
        default=None, description="Subnet (10.1.0.0/16): on each node the one address that is in it."
    )


class Slurm(Strict):
    """The job that `slurm/disagg.sh`, `render --slurm` and `up --slurm` ask for; sbatch's own options win over it."""

    nodes: Count | None = Field(
        default=None,
        description="Nodes of the job; null: as many as the roles need with devices_per_node devices on each.",
    )
    time: str | None = Field(
        default=None, description='Time limit as sbatch takes it, in quotes ("08:00:00"); null: the partition\'s own.'
    )
    partition: str | None = Field(default=None, description="Partition; null: the site's default.")
    account: str | None = Field(default=None, description="Account that is charged; null: the user's default.")
    qos: str | None = Field(default=None, description="Quality of service; null: the user's default.")
    reservation: str | None = Field(default=None, description="Reservation to run in.")
    constraint: str | None = Field(default=None, description="Node features that sbatch must find (mi355x&ib).")
    options: list[str] = Field(
        default=[],
        description="Further sbatch options, one `--name=value` each. --gres, --gpus-per-node, --mem, --exclusive and "
        "--requeue take the place of what pdserve writes there.",
    )


Kind = Literal["docker", "apptainer", "pyxis"]


class Container(Strict):
    """A container around each node's agent, so that PIDs and shared memory stay local to the agent. pdserve itself, the
    run directory and a local model are mounted at their own paths."""

    kind: Kind = Field(description="docker, apptainer, or pyxis (enroot through srun: Slurm only).")
    image: str | None = Field(default=None, description="Image, or a file of one; null: the recipe's own `image`.")
    mounts: list[str] = Field(
        default=[], description="SRC:DST or SRC:DST:ro, absolute paths: a model cache, libraries of the host, ..."
    )
    env: EnvMap = Field(default={}, description="Environment inside; it wins over what the image and the node say.")
    store: str | None = Field(
        default=None,
        description="apptainer, pyxis: folder that all nodes share, for the file that is made of a registry's image "
        "(.sif, .sqsh), once for all nodes and runs. null: `.images` in PDSERVE_HOME.",
    )
    disk_gib: float = Field(
        default=60,
        gt=0,
        description="Free disk that is asked for before an image is fetched: its size unpacked. An image of vLLM for "
        "GPUs takes tens of GiB.",
    )
    compile_cache: str | None = Field(
        default=None,
        description="Absolute folder on each node that outlives a run, for the kernels that vLLM, torch, Triton, "
        "FlashInfer and AITER compile, in a folder of its own for each image and model. null: they are compiled anew "
        "by each run.",
    )
    shm_gib: float | None = Field(
        default=None,
        gt=0,
        description="docker: a /dev/shm of its own of this size, which vanishes with the container. null: the node's.",
    )
    python: str = Field(
        default="python3", description="Interpreter inside that has vLLM and pdserve's dependencies; it runs the agent."
    )
    options: list[str] = Field(
        default=[],
        description="Further options of `docker run`, `apptainer exec` or srun (pyxis): `--name=value`, `--name value` "
        "or short (`-v`, `-e`). Those that may stand several times are added to pdserve's own (a device, limit or "
        "capability that pdserve sets too is replaced); one that stands once takes the place of pdserve's.",
    )
    leave_out: list[str] = Field(
        default=[],
        description="Options that pdserve sets and shall not: a name takes all of it away (`--gpus`), a value that one "
        "(`--device=/dev/dri`, `--ulimit=memlock`). `pdserve render` shows what is set.",
    )


class Logs(Strict):
    """The size that the log of one process may have. Its writer is never interrupted."""

    max_mib: Annotated[int, Field(ge=0)] = Field(
        default=256,
        description="A log that is larger is cut: what it held goes to NAME.log.1, and that of before to NAME.log.2, "
        "... 0: never. Where no copy fits on the disk, the end of the log is kept and the rest is lost.",
    )
    keep: Annotated[int, Field(ge=0)] = Field(
        default=3, description="How many of the files that were cut off are kept, for each process."
    )
