"""What a deployment leaves open to whoever reaches the address, without its key."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pdserve.pd.config.proxy import ProxyConfig
from pdserve.plan import mooncake_store
from pdserve.plan.lmcache.servers import CacheServer
from pdserve.plan.model import Exposure
from pdserve.plan.nodes.node import Node
from pdserve.plan.nodes.placement import Instance
from pdserve.plan.ports import AssignedPorts
from pdserve.plan.proxy.vllm_router import METRICS_HOST
from pdserve.recipe import effective
from pdserve.recipe.connectors.registry import kinds_of, ports_of
from pdserve.recipe.flags import LOOPBACK
from pdserve.recipe.model import Recipe

EVERYWHERE = "0.0.0.0"
RANDOM_PORT = 0


def exposed(
    recipe: Recipe,
    nodes: Sequence[Node],
    instances: Sequence[Instance],
    servers: Sequence[CacheServer],
    ports: AssignedPorts,
    proxy: ProxyConfig,
) -> tuple[Exposure, ...]:
    """In process order, the proxy last."""
    return (
        *(entry for server in servers for entry in _server(server, ports)),
        *mooncake_store.exposed(recipe, nodes, ports),
        *(entry for instance in instances for entry in _instance(recipe, instance, ports)),
        *(_router(proxy, ports) if recipe.proxy.kind == "vllm-router" else _proxy(proxy)),
    )


def _proxy(proxy: ProxyConfig) -> Iterator[Exposure]:
    who = "clients need no key" if proxy.auth.keys_file is None else "clients need a key"
    yield Exposure(process="proxy", address=proxy.host, port=proxy.port, what=f"the OpenAI API: {who}")
    if proxy.admin is not None and proxy.admin.port is not None:
        who = "asks for no token" if proxy.admin.token_file is None else "asks for its token"
        what = f"admin of the proxy: workers, reloading; {who}"
        yield Exposure(process="proxy", address=proxy.admin.host, port=proxy.admin.port, what=what)


def _router(proxy: ProxyConfig, ports: AssignedPorts) -> Iterator[Exposure]:
    yield Exposure(
        process="proxy",
        address=proxy.host,
        port=proxy.port,
        what="the OpenAI API and the router's own endpoints, which remove workers: clients need no key",
    )
    yield Exposure(
        process="proxy", address=METRICS_HOST, port=ports.first("proxy", "metrics"), what="figures of the router"
    )


def _server(server: CacheServer, ports: AssignedPorts) -> Iterator[Exposure]:
    yield Exposure(
        process=server.name,
        address=LOOPBACK,
        port=ports.first(server.name, "request"),
        what="LMCache requests: reads and writes cached KV",
    )
    yield Exposure(
        process=server.name,
        address=LOOPBACK,
        port=ports.first(server.name, "http"),
        what="LMCache HTTP: status, clearing the cache, its environment (no secrets are in it)",
    )


def _instance(recipe: Recipe, instance: Instance, ports: AssignedPorts) -> Iterator[Exposure]:
    open_paths = "/metrics, /health, /load, /tokenize (the key guards /v1 and /inference)"
    if recipe.engine.cache_reset_endpoint:
        open_paths += "; development endpoints: reset, sleep, abort, remote calls to workers"
    for rank, share in enumerate(instance.shares):
        process, address = instance.process_name(rank), share.node.address
        if http := ports.range(process, "http"):
            yield Exposure(process=process, address=address, port=http.start, what=open_paths)
        yield from _connectors(recipe, instance, process, address, ports)
        if events := ports.range(process, "kv_events"):
            yield Exposure(
                process=process,
                address=EVERYWHERE,
                port=events.start,
                last_port=events.stop - 1,
                what="KV events: token ids of the prompts and answers in the cache",
            )
        if master := ports.range(process, "dp_master"):
            yield Exposure(
                process=process,
                address=address,
                port=master.start,
                last_port=master.stop - 1 if len(master) > 1 else None,
                what="rendezvous of the nodes of this instance",
            )


def _connectors(
    recipe: Recipe, instance: Instance, process: str, address: str, ports: AssignedPorts
) -> Iterator[Exposure]:
    connector = effective.connector_of(recipe, instance.role_name, instance.role)
    for port in ports_of(connector):
        if taken := ports.range(process, port.purpose):
            yield Exposure(
                process=process,
                address=EVERYWHERE if port.everywhere else address,
                port=taken.start,
                last_port=taken.stop - 1 if len(taken) > 1 else None,
                what=port.exposes,
            )
    for kind in kinds_of(connector):
        if what := kind.random_ports.get(instance.role_name):
            yield Exposure(process=process, address=address, port=RANDOM_PORT, what=what)
