"""The master of a Mooncake store, one a deployment, and what its engines must know of it.

Facts that shape it (mooncake 0.3.13, vLLM 0.32): an engine reads MOONCAKE_CONFIG_PATH when its connector is built, and
waits without a limit for a master that does not answer, so the master is ready before them. With P2PHANDSHAKE no
metadata server is needed. The master's own defaults bind every interface.
"""

from __future__ import annotations

import json
import posixpath
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from pdserve.plan.environment import store_master_env
from pdserve.plan.model import Exposure
from pdserve.plan.node import Node
from pdserve.plan.placement import Instance
from pdserve.plan.ports import AssignedPorts, Need
from pdserve.plan.process import HttpProbe, Process
from pdserve.recipe import effective
from pdserve.recipe.connectors.base import HostMemory
from pdserve.recipe.connectors.mooncake import FORCE_TCP, MooncakeStoreSection, device_names
from pdserve.recipe.connectors.registry import AnyConnector, uses_store
from pdserve.recipe.flags import LOOPBACK
from pdserve.recipe.model import Recipe, RestartPolicy
from pdserve.recipe.sections import MooncakeStore
from pdserve.roles import ENGINE_ROLES

NAME = "mooncake-master"
START_STAGE = 0
STOP_STAGE = 3
_GIB = 1 << 30
_RESTART = RestartPolicy(policy="on-failure", max=20, backoff_seconds=0.5, backoff_max_seconds=10)
"""It is up again in a second, and prompts wait for it."""
_RPC = "mooncake_master"
_HTTP = "mooncake_master_http"


@dataclass(frozen=True)
class StoreClient:
    """A client of the store: an engine's file in the run directory, and its variables."""

    files: Mapping[str, str]
    variables: Mapping[str, str]
    rdma_devices: tuple[str, ...] = ()
    """Those that the section names."""


def master_needs(recipe: Recipe, node: Node) -> Iterator[Need]:
    """Yield the ports of the master, which is on `node`."""
    if recipe.mooncake_store is not None:
        yield Need(node.name, NAME, _RPC, role="mooncake-master")
        yield Need(node.name, NAME, _HTTP, role="mooncake-master")


def master_processes(recipe: Recipe, node: Node, ports: AssignedPorts, *, python: str) -> Iterator[Process]:
    """Yield the master on `node`; nothing without the section. Its HTTP side has no key, and stays on loopback."""
    section = recipe.mooncake_store
    if section is None:
        return
    pinned = ports.pinned(NAME)
    flags: dict[str, object] = {
        "rpc_address": node.address,
        "rpc_port": pinned["rpc"],
        "metrics_host": LOOPBACK,
        "metrics_port": pinned["http"],
        # A line every ten seconds otherwise; the same figures are on its HTTP side.
        "enable_metric_reporting": False,
        **section.extra_args,
    }
    program = section.command if section.command is not None else [python, "-m", "mooncake.cli"]
    yield Process(
        name=NAME,
        role="mooncake-master",
        node=node.name,
        argv=(*program, *(f"-{name}={_text(value)}" for name, value in flags.items())),
        env=store_master_env(),
        ports=pinned,
        log=f"logs/{NAME}@{node.name}.log",
        probe=HttpProbe(host=LOOPBACK, port=pinned["http"], path="/health", body_contains='"service_ready":true'),
        start_stage=START_STAGE,
        stop_stage=STOP_STAGE,
        ready_seconds=recipe.timeouts.store_master_seconds,
        stop_seconds=recipe.timeouts.stop_seconds,
        restart=_RESTART if section.on_death == "restart" else RestartPolicy(policy="never"),
        packages=(MooncakeStoreSection.ABOUT.package,) if section.command is None else (),
        reached_by={"rpc": ENGINE_ROLES},
    )


def client_of(
    recipe: Recipe, connector: AnyConnector | None, process: str, ports: AssignedPorts, master: Node, *, run_dir: str
) -> StoreClient:
    """Return the client of an engine whose connector uses the store; an empty one otherwise, and where a raw connector
    has no section: then its author's own variables count."""
    section = recipe.mooncake_store
    if section is None or not uses_store(connector):
        return StoreClient({}, {})
    path = f"mooncake-store-{process}.json"
    content = {
        "metadata_server": "P2PHANDSHAKE",
        "master_server_address": f"{master.address}:{ports.first(NAME, 'rpc')}",
        "protocol": section.protocol,
        "device_name": section.device_name,
        "mode": "embedded",
        "global_segment_size": int(section.segment_gib * _GIB),
        "local_buffer_size": int(section.buffer_gib * _GIB),
    }
    variables = {"MOONCAKE_CONFIG_PATH": posixpath.join(run_dir, path)}
    if section.protocol == "tcp":
        variables[FORCE_TCP] = "1"
    devices = device_names(section.device_name)
    return StoreClient({path: json.dumps(content, indent=2) + "\n"}, variables, devices)


def host_memory(recipe: Recipe, instance: Instance, rank: int) -> HostMemory:
    """Return the host memory that an instance's connectors take of its node of that rank."""
    share, dp = instance.shares[rank], instance.role.parallel.dp
    connector = effective.connector_of(recipe, instance.role_name, instance.role)
    memory = HostMemory()
    for leaf in effective.sections(connector):
        memory += leaf.host_memory(
            ranks=max(1, dp // len(instance.shares)), workers=share.workers, platform=recipe.platform
        )
    if recipe.mooncake_store is not None and uses_store(connector):
        memory += _pool(recipe.mooncake_store, share.workers)
    return memory


def master_exposures(recipe: Recipe, nodes: Sequence[Node], ports: AssignedPorts) -> Iterator[Exposure]:
    """Yield what the master leaves open without a key."""
    if recipe.mooncake_store is None:
        return
    yield Exposure(
        process=NAME,
        address=nodes[0].address,
        port=ports.first(NAME, "rpc"),
        what="master of the Mooncake store: reads, replaces and removes what the pool holds",
    )
    yield Exposure(process=NAME, address=LOOPBACK, port=ports.first(NAME, "http"), what="figures of the master")


def _pool(section: MooncakeStore, workers: int) -> HostMemory:
    return HostMemory(int((section.segment_gib + section.buffer_gib) * _GIB) * workers)


def _text(value: object) -> str:
    """Return the value as gflags reads it."""
    return str(value).lower() if isinstance(value, bool) else str(value)
