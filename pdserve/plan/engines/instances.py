"""The processes of the engine instances."""

from __future__ import annotations

import posixpath
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pdserve.plan.engines import kv_transfer
from pdserve.plan.engines.argv import Rendezvous, vllm_argv
from pdserve.plan.engines.patching import select_patches
from pdserve.plan.environment import engine_env
from pdserve.plan.lmcache.servers import Server, servers_of
from pdserve.plan.model import HttpProbe, Process, Ranks, Versions
from pdserve.plan.nodes.placement import Instance
from pdserve.plan.ports import TRANSFER_PORTS, Need, Ports
from pdserve.recipe import effective
from pdserve.recipe.effective import AnyConnector
from pdserve.recipe.model import Recipe
from pdserve.recipe.sections.connectors import Mooncake
from pdserve.recipe.sections.lmcache import RoleName

START_STAGE = 1
_STOP_STAGE: dict[RoleName, int] = {"decode": 1, "prefill": 2, "aggregated": 2}


@dataclass(frozen=True)
class EngineInputs:
    """What every engine process is made of."""

    recipe: Recipe
    run_dir: str
    connectors: Mapping[RoleName, AnyConnector | None]
    servers: Sequence[Server]
    ports: Ports
    model: str
    versions: Versions
    python: str
    hosts: Sequence[str]
    """Addresses of all nodes."""


def port_needs(recipe: Recipe, instance: Instance, connector: AnyConnector | None) -> Iterator[Need]:
    """The ports of an instance on each of its nodes."""
    names = kv_transfer.class_names(connector)
    parallel = instance.role.parallel
    for rank, share in enumerate(instance.shares):
        node, process = share.node.name, instance.process_name(rank)
        if rank == 0:
            yield Need(node, process, instance.role_name)
            if "MooncakeConnector" in names and instance.role_name == "prefill":
                yield Need(node, process, "bootstrap")
            if effective.publishes_kv_events(recipe, instance.role_name):
                yield Need(node, process, "kv_events", 2 * parallel.dp)
        if "MooncakeConnector" in names:
            yield Need(node, process, "transfer", TRANSFER_PORTS)
        if "NixlConnector" in names:
            yield Need(node, process, "nixl", parallel.dp)
        if rank == 0 and len(instance.shares) > 1:
            yield Need(node, process, "dp_master", 2 if parallel.dp > 1 else 1)


def engine_processes(inputs: EngineInputs, instance: Instance) -> Iterator[Process]:
    """One process a node; the followers of an instance that spans nodes are headless and never probed."""
    recipe, ports = inputs.recipe, inputs.ports
    connector = inputs.connectors[instance.role_name]
    attached = servers_of(inputs.servers, instance)
    patches = select_patches(recipe, instance.role, connector, inputs.versions)
    config = None
    if connector is not None:
        request_ports = tuple(ports.first(server.name, "request") for server in attached)
        context = kv_transfer.Context(recipe, instance.role_name, request_ports, patches)
        config = kv_transfer.kv_transfer_config(connector, instance.role, context)
    transfer = effective.transfer_of(connector)
    for rank, share in enumerate(instance.shares):
        name = instance.process_name(rank)
        port = ports.first(name, "http") if rank == 0 else None
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
                python=recipe.engine.python or inputs.python,
            ),
            env=engine_env(
                recipe,
                instance,
                rank=rank,
                ports=ports,
                patches=patches,
                patch_record=posixpath.join(inputs.run_dir, "patches", name),
                mooncake=transfer if isinstance(transfer, Mooncake) else None,
                hosts=inputs.hosts,
            ),
            devices=share.devices,
            ports=ports.pinned(name),
            log=f"logs/{name}@{share.node.name}.log",
            probe=HttpProbe(host=share.node.address, port=port, path="/health") if port is not None else None,
            start_stage=START_STAGE,
            stop_stage=_STOP_STAGE[instance.role_name],
            ready_seconds=recipe.timeouts.engine_seconds,
            stop_seconds=recipe.timeouts.stop_seconds,
            restart=instance.role.restart,
            lmcache=attached[0].name if attached else None,
            patches=patches,
            ranks=_ranks(instance, rank),
            instance=instance.name,
        )


def _ranks(instance: Instance, rank: int) -> Ranks:
    """Followers have no API server, and no EngineCore unless they are DP ranks of their own."""
    parallel = instance.role.parallel
    cores = max(parallel.dp // len(instance.shares), 1 if rank == 0 else 0)
    return Ranks(cores=cores, workers=instance.shares[rank].workers)


def _kv_events(instance: Instance, ports: Ports) -> dict[str, Any] | None:
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


def _rendezvous(instance: Instance, ports: Ports) -> Rendezvous | None:
    taken = ports.range(instance.name, "dp_master")
    if not taken:
        return None
    return Rendezvous(instance.leader.node.address, taken[0], taken[1] if len(taken) > 1 else None)
