"""LMCache MP servers of a deployment: one a node that hosts an attached engine, or one a TP rank there.

Never shared across nodes: engines hand it shared memory and IPC handles, which mean nothing on another node.

A server that runs keeps its name, its threads and the devices that it sees, whoever attaches to it now: it would lose
its cache otherwise. With fewer threads than workers some of their transfers run one after another. Only an engine on
devices that it does not see needs another server.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from pdserve.errors import RecipeError
from pdserve.installed.versions import Versions
from pdserve.known import HANG_ON_ROCM
from pdserve.patches.lmcache.host_events import SWITCH
from pdserve.plan import environment
from pdserve.plan.model import LmcacheServer
from pdserve.plan.node import Node
from pdserve.plan.patching import SERVER_MAIN, is_on, select_server_patches
from pdserve.plan.placement import Instance
from pdserve.plan.ports import AssignedPorts, Need
from pdserve.plan.process import LmcacheProbe, Process
from pdserve.plan.running import NOTHING, RunningProcesses, free_name
from pdserve.recipe import effective
from pdserve.recipe.connectors.caches import LmcacheMpSection
from pdserve.recipe.effective import lmcache_leaves, roles, transfer_mode_of
from pdserve.recipe.flags import LOOPBACK, SERVER_FLAGS, ServerFacts, flag_words, own_flags
from pdserve.recipe.model import Recipe, RestartPolicy
from pdserve.recipe.sections import Lmcache


def lmcache_argv(
    section: Lmcache,
    *,
    instance_id: str,
    staging: str,
    port: int,
    http_port: int,
    threads: int,
    on_cpu: bool,
    python: str,
    with_patches: bool = False,
) -> tuple[str, ...]:
    """`threads`: for transfers, unless the recipe says how many. `staging`: a name that no other server of the
    deployment has. `with_patches`: the server is started through the main that loads patches."""
    module = SERVER_MAIN if with_patches else "lmcache.v1.multiprocess.http_server"
    program = section.command if section.command is not None else [python, "-m", module]
    own = own_flags(
        SERVER_FLAGS,
        ServerFacts(
            section=section,
            instance_id=instance_id,
            staging=staging,
            port=port,
            http_port=http_port,
            threads=threads,
            on_cpu=on_cpu,
        ),
    )
    free = {name: value for name, value in section.extra_args.items() if name not in own}
    return (*program, *flag_words({**own, **free}))


START_STAGE = 0
STOP_STAGE = 3
_GIB = 1 << 30


@dataclass(frozen=True)
class CacheServer:
    """One server, before it has ports."""

    name: str
    section: Lmcache
    node: Node
    tp_rank: int | None
    """None: it serves all ranks."""
    engines: tuple[Instance, ...]
    running: Process | None = None
    """The process that has this name on this node already."""

    @property
    def workers_of(self) -> dict[str, int]:
        """The workers of each engine that will register."""
        return {engine.name: 1 if self.tp_rank is not None else engine.leader.workers for engine in self.engines}

    @property
    def workers(self) -> int:
        """All of them."""
        return sum(self.workers_of.values())

    @property
    def threads(self) -> int:
        """The threads for transfers, where the recipe does not say: one for each worker."""
        words = () if self.running is None else self.running.argv
        kept = [int(value) for flag, value in pairwise(words) if flag == "--max-workers" and value.isdecimal()]
        return kept[-1] if kept else self.workers

    @property
    def devices(self) -> tuple[int, ...]:
        """Devices of all its engines, or more."""
        used = {device for engine in self.engines for device in engine.leader.devices}
        if self.running is not None and used <= set(self.running.devices):
            return self.running.devices
        return tuple(sorted(used))

    def needs(self) -> tuple[Need, ...]:
        keys = ("lmcache", "lmcache_http")
        return tuple(Need(self.node.name, self.name, key, role="lmcache") for key in keys)


def servers_for(
    recipe: Recipe, attaching: Sequence[Instance], running: RunningProcesses = NOTHING
) -> tuple[CacheServer, ...]:
    """The servers for the instances whose connector attaches, in node order."""
    section = recipe.lmcache
    if section is None:
        return ()
    engines = [instance for instance in attaching if instance.role_name in section.on]
    if not engines:
        raise RecipeError(
            f"no engine attaches to LMCache: lmcache.on is [{', '.join(section.on)}] and the connectors of those roles "
            "have no lmcache-mp",
            where="lmcache.on",
            todo="give a role in lmcache.on the connector lmcache-mp (alone or in multi), or drop the lmcache section",
        )
    _check_engines(section, engines)
    by_node: dict[str, list[Instance]] = {}
    for engine in engines:
        by_node.setdefault(engine.leader.node.name, []).append(engine)
    servers: list[CacheServer] = []
    there = running.of_role("lmcache")
    taken = {process.name for process in there}
    for name, group in by_node.items():
        ranks = range(max(e.role.parallel.tp for e in group)) if section.per == "tp-rank" else (None,)
        kept = iter([process for process in there if process.node == name])
        for rank in ranks:
            served = tuple(e for e in group if rank is None or rank < e.role.parallel.tp)
            process = next(kept, None)
            server = free_name("lmcache", taken) if process is None else process.name
            servers.append(CacheServer(server, section, group[0].leader.node, rank, served, process))
    return tuple(servers)


def attached_servers(servers: Sequence[CacheServer], engine: Instance) -> tuple[CacheServer, ...]:
    """The servers that this engine attaches to, in TP-rank order."""
    return tuple(server for server in servers if engine in server.engines)


def server_process(
    recipe: Recipe,
    server: CacheServer,
    ports: AssignedPorts,
    *,
    run_dir: str,
    run_id: str,
    python: str,
    versions: Versions,
) -> Process:
    """The process of one server."""
    instance_id, pinned = _instance_id(server, run_id), ports.pinned(server.name)
    patches = select_server_patches(recipe, server.section, versions)
    env = environment.lmcache_env(recipe, server.section, server.devices)
    record = posixpath.join(run_dir, "patches", server.name)
    added = environment.patch_variables(recipe, patches, record) if patches else {}
    return Process(
        name=server.name,
        role="lmcache",
        node=server.node.name,
        argv=lmcache_argv(
            server.section,
            instance_id=instance_id,
            staging=f"{recipe.name}-{server.name}-{server.node.name}",
            port=pinned["request"],
            http_port=pinned["http"],
            threads=server.threads,
            on_cpu=recipe.platform == "cpu",
            python=python,
            with_patches=bool(patches),
        ),
        env=env.model_copy(update={"set": {**env.set, **added}}),
        devices=server.devices,
        ports=pinned,
        log=f"logs/{server.name}@{server.node.name}.log",
        probe=LmcacheProbe(host=LOOPBACK, port=pinned["http"], instance_id=instance_id),
        start_stage=START_STAGE,
        stop_stage=STOP_STAGE,
        ready_seconds=recipe.timeouts.lmcache_seconds,
        stop_seconds=recipe.timeouts.stop_seconds,
        restart=RestartPolicy(policy="on-failure" if server.section.on_death == "restart" else "never"),
        patches=patches,
        packages=(LmcacheMpSection.ABOUT.package,) if server.section.command is None else (),
    )


def lmcache_summary(recipe: Recipe, server: CacheServer, ports: AssignedPorts, *, run_id: str) -> LmcacheServer:
    """Return what the launcher must know of a server beyond its process."""
    return LmcacheServer(
        process=server.name,
        http_url=f"http://{LOOPBACK}:{ports.first(server.name, 'http')}",
        instance_id=_instance_id(server, run_id),
        engines=tuple(engine.name for engine in server.engines),
        workers_of=server.workers_of,
        expected_workers=server.workers,
        l1_bytes=int(server.section.l1_size_gb * _GIB),
        shm_name=server.section.shm_name,
        kv_bytes_on_host=sum(_kv_bytes_on_host(recipe, engine) for engine in server.engines),
        on_death=server.section.on_death,
    )


def moves_kv_to_host(recipe: Recipe, engine: Instance) -> bool:
    """Return whether an engine moves its whole KV into /dev/shm: lmcache_driven on a CPU, where the server maps it."""
    if recipe.platform != "cpu":
        return False
    leaves = effective.lmcache_leaves(effective.connector_of(recipe, engine.role_name, engine.role))
    return any(effective.transfer_mode_of(recipe, leaf)[1] == "lmcache_driven" for leaf in leaves)


def kv_gib_on_cpu(recipe: Recipe, instance: Instance) -> int | None:
    """VLLM_CPU_KVCACHE_SPACE of one worker, in GiB; None when vLLM sizes it itself."""
    value = effective.env_of(recipe, instance.role).get("VLLM_CPU_KVCACHE_SPACE")
    return int(value) if isinstance(value, int | str) and str(value).isdigit() else None


def _kv_bytes_on_host(recipe: Recipe, engine: Instance) -> int:
    if not moves_kv_to_host(recipe, engine):
        return 0
    return (kv_gib_on_cpu(recipe, engine) or 0) * _GIB * engine.leader.workers


def _instance_id(server: CacheServer, run_id: str) -> str:
    return f"{run_id}-{server.name}"


def _check_engines(section: Lmcache, engines: Sequence[Instance]) -> None:
    for engine in engines:
        where = f"{engine.role_name}.parallel"
        if len(engine.shares) > 1:
            raise RecipeError(
                f"{engine.name} spans nodes and attaches to LMCache",
                where=f"{where}.nodes",
                cause="a server serves its own node only, and the leader looks up what its followers stored",
                todo=f"take {engine.role_name} out of lmcache.on, or keep its instances within a node",
            )
        if section.per == "tp-rank" and (engine.role.parallel.pp > 1 or engine.role.parallel.dp > 1):
            raise RecipeError(
                "lmcache.per: tp-rank works with tensor parallelism only",
                where=where,
                cause="with several servers LMCache's client supports neither data nor pipeline parallelism",
                todo="use lmcache.per: node, or pp 1 and dp 1",
            )


def rocm_warnings(recipe: Recipe) -> Iterator[str]:
    """Warnings. Opening an event of another process blocks for ever on some ROCm stacks, and only lmcache_driven
    does so. Can go when LMCache's import_event has a way of its own for ROCm (lmcache#4419)."""
    if recipe.platform != "rocm":
        return
    host_events = recipe.lmcache is not None and is_on(recipe.lmcache, SWITCH)
    for name, _, connector in roles(recipe):
        for leaf in lmcache_leaves(connector):
            if transfer_mode_of(recipe, leaf)[1] == "lmcache_driven":
                yield f"{name}: {_HOST_EVENTS if host_events else _HANG}"


_HANG = (
    f"{HANG_ON_ROCM.what} ({HANG_ON_ROCM.source}; seen with ROCm 7.14 and vllm 0.23, and with ROCm "
    "7.2.3 at the start on gfx950: MI350X, MI355X; not with ROCm 7.2.3 and vllm 0.27): "
    f"let `pdserve verify` prove a reload; where it hangs, set lmcache.env.{SWITCH}: 1 (patch lmcache-host-events), or "
    "lmcache.transfer_mode: engine_driven. Not the change that the issue proposes: with it KV is copied before it is "
    "written"
)
_HOST_EVENTS = (
    f"{SWITCH} is on: no event of another process is opened (lmcache#4419), and a step that stores is waited for. This "
    "was proven by simulation only: let `pdserve verify` prove a reload"
)
