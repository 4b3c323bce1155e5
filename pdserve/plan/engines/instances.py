"""The processes of the engine instances."""

from __future__ import annotations

import posixpath
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from pdserve.plan import mooncake_store
from pdserve.plan.engines import kv_transfer
from pdserve.plan.engines.argv import vllm_argv
from pdserve.plan.engines.patching import select_patches
from pdserve.plan.environment import engine_env
from pdserve.plan.lmcache.servers import CacheServer, servers_of
from pdserve.plan.model import Versions
from pdserve.plan.nodes.node import Node
from pdserve.plan.nodes.placement import Instance
from pdserve.plan.ports import AssignedPorts, Need
from pdserve.plan.process import HttpProbe, PlannedConnector, Process, Ranks
from pdserve.recipe import effective
from pdserve.recipe.connectors.base import ConnectorPort, Context
from pdserve.recipe.connectors.registry import AnyConnector, kinds_of, ports_of
from pdserve.recipe.flags import Rendezvous
from pdserve.recipe.model import Recipe
from pdserve.roles import EngineRole, ProcessRole

START_STAGE = 1
_STOP_STAGE: dict[EngineRole, int] = {"decode": 1, "prefill": 2, "aggregated": 2}


@dataclass(frozen=True)
class EngineInputs:
    """What every engine process is made of."""

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
        """Where the proxy is, and the master of a store."""
        return self.nodes[0]


def port_needs(recipe: Recipe, instance: Instance, connector: AnyConnector | None) -> Iterator[Need]:
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
    attached = servers_of(inputs.servers, instance)
    patches = select_patches(recipe, instance.role, connector, inputs.versions)
    config = None
    if connector is not None:
        request_ports = tuple(ports.first(server.name, "request") for server in attached)
        modules = kv_transfer.modules_of(patches)
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
        config = kv_transfer.kv_transfer_config(connector, instance.role, context)
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
        connectors = (
            () if config is None else kv_transfer.planned_connectors(config, env.set, store_devices=client.rdma_devices)
        )
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
    """Those of the first process of the instance, by purpose."""
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
    """Without the rendezvous of an instance's own processes."""
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
