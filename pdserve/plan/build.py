"""Recipe + nodes -> Plan: the one place where a deployment is decided.

Start stages: the commands of the setup (..., -3, -2), the download of the weights (-1), LMCache and the master of a
Mooncake store (0), then engines and the proxy together (1). The proxy starts beside the engines, so that a broken one
shows in its first second and not after half an hour of loading; it routes nothing until the launcher reports a worker
ready. vllm-router gets no reports and waits for engines by itself, so it is a stage of its own (2). Stop stages: proxy,
setup and a download (0), decode (1), prefill or aggregated (2), LMCache and that master (3).
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pdserve.installed.versions import PACKAGES
from pdserve.pd.config.proxy import ProxyConfig
from pdserve.plan import engines, lmcache, model_rules, mooncake_store, patching, placement, proxy, versions
from pdserve.plan.engines import EngineInputs, engine_port_needs, engine_processes
from pdserve.plan.lmcache import (
    CacheServer,
    kv_gib_on_cpu,
    lmcache_summary,
    moves_kv_to_host,
    server_process,
    servers_for,
)
from pdserve.plan.model import Exposure, Plan, Versions
from pdserve.plan.node import Node
from pdserve.plan.placement import Instance
from pdserve.plan.ports import AssignedPorts
from pdserve.plan.preparation import setup_processes, weights_processes
from pdserve.plan.process import Process
from pdserve.plan.proxy import ROUTER_METRICS_HOST
from pdserve.plan.running import NOTHING, RunningProcesses
from pdserve.plan.versions import recipe_use
from pdserve.recipe import effective
from pdserve.recipe.connectors.registry import (
    AnyConnector,
    RawSection,
    attaches_lmcache,
    class_names,
    kinds_of,
    ports_of,
    untested_connectors,
)
from pdserve.recipe.flags import LOOPBACK
from pdserve.recipe.model import Recipe
from pdserve.recipe.sections import Logs
from pdserve.roles import EngineRole


def build_plan(
    recipe: Recipe,
    nodes: Sequence[Node],
    *,
    run_dir: str,
    run_id: str,
    versions: Versions,
    python: str = "python",
    recipe_dir: str = ".",
    recipe_file: str = "RECIPE",
    model_config: Mapping[str, Any] | None = None,
    running: RunningProcesses = NOTHING,
) -> Plan:
    """Return the whole deployment as data. `recipe_dir` is what model.path is relative to; `recipe_file` is quoted in
    advice. `python` runs what is on a node that names no interpreter of its own; engine.python wins for all but the
    proxy. `model_config`: the content of the model's config.json; None where it is not at hand. `running`: the
    deployment that gets this plan; what it has already stays where it is.

    Raises RecipeError for what cannot work anywhere, PreflightError for what does not fit these nodes or versions.
    """
    model_rules.check_experts(recipe, model_config)
    nodes = running.order(nodes)
    renamed, versions = versions, versions.as_releases()
    warnings = [
        *_same_code(renamed),
        *_check_versions(recipe, versions),
        *model_rules.check_kv_groups(recipe, model_config, versions),
    ]
    instances = placement.place(recipe, nodes, running=running, recipe_file=recipe_file)
    connectors: dict[EngineRole, AnyConnector | None] = {
        name: connector for name, _, connector in effective.roles(recipe)
    }
    protocol = engines.proxy_protocol(recipe)
    router = recipe.proxy.kind == "vllm-router"
    servers = servers_for(recipe, [i for i in instances if attaches_lmcache(connectors[i.role_name])], running)
    ports = AssignedPorts(
        recipe,
        [
            *(need for server in servers for need in server.needs()),
            *(need for i in instances for need in engine_port_needs(recipe, i, connectors[i.role_name])),
            *mooncake_store.master_needs(recipe, nodes[0]),
            *proxy.proxy_port_needs(recipe, nodes[0]),
            *([proxy.router_metrics_need(nodes[0])] if router else []),
        ],
        running,
    )
    path = recipe.model.path
    folder = None if path is None else posixpath.normpath(posixpath.join(recipe_dir, path))
    model = folder or recipe.model.id or ""
    pythons = {node.name: recipe.engine.python or node.python(python) for node in nodes}
    proxy_python = nodes[0].python(python)
    hosts = [node.address for node in nodes]
    inputs = EngineInputs(recipe, run_dir, connectors, servers, ports, model, versions, pythons, nodes)
    config = proxy.proxy_config(recipe, protocol, instances, ports, recipe_dir=recipe_dir, run_dir=run_dir)
    return Plan(
        name=recipe.name,
        run_dir=run_dir,
        mode=recipe.mode,
        platform=recipe.platform,
        served_name=recipe.model.served_name,
        model=model,
        model_path=folder,
        revision=recipe.model.revision,
        nodes=tuple(nodes),
        processes=_with_logs(
            recipe.logs,
            *setup_processes(recipe, instances, hosts=hosts, running=running),
            *weights_processes(recipe, instances, run_dir=run_dir, pythons=pythons, hosts=hosts, running=running),
            *(
                server_process(
                    recipe,
                    server,
                    ports,
                    run_dir=run_dir,
                    run_id=run_id,
                    python=pythons[server.node.name],
                    versions=versions,
                )
                for server in servers
            ),
            *mooncake_store.master_processes(recipe, nodes[0], ports, python=pythons[nodes[0].name]),
            *(process for instance in instances for process in engine_processes(inputs, instance)),
            proxy.router_process(recipe, nodes[0], config, ports, python=proxy_python)
            if router
            else proxy.proxy_process(recipe, nodes[0], config, run_dir=run_dir, python=proxy_python),
        ),
        lmcache=tuple(lmcache_summary(recipe, server, ports, run_id=run_id) for server in servers),
        proxy=config,
        proxy_kind=recipe.proxy.kind,
        canary_seconds=recipe.timeouts.canary_seconds,
        timeouts=recipe.timeouts,
        on_node_loss=recipe.on_node_loss,
        retention=recipe.retention,
        verify=recipe.verify,
        cache_reset_endpoint=recipe.engine.cache_reset_endpoint,
        chunk_size=recipe.lmcache.chunk_size if recipe.lmcache is not None and servers else None,
        max_tokens_per_load=patching.load_cap(recipe),
        min_load_tokens=patching.minimum_load(recipe),
        exposed=open_ports(recipe, nodes, instances, servers, ports, config),
        warnings=(*warnings, *_warnings(recipe, connectors, instances), *proxy.loopback_warnings(recipe, nodes)),
    )


def _with_logs(logs: Logs, *processes: Process) -> tuple[Process, ...]:
    return tuple(process.model_copy(update={"logs": logs}) for process in processes)


def _same_code(installed: Versions) -> Iterator[str]:
    for package, release in installed.same_code.items():
        version = getattr(installed, package)
        yield f"{package} {version} is planned for as {release}: the code that patches depend on is the same"


def _check_versions(recipe: Recipe, installed: Versions) -> Iterator[str]:
    versions.check_requires(recipe.requires.items(), installed)
    use = recipe_use(recipe)
    for package, flags in use.flags:
        yield from versions.check_flags(flags, package, installed)
    yield from versions.check_known(use.features, installed)
    counted = [name for name in PACKAGES if name == "vllm" or name in use.packages]
    yield from versions.check_coverage(counted, installed)


def _warnings(
    recipe: Recipe, connectors: Mapping[EngineRole, AnyConnector | None], instances: Sequence[Instance]
) -> Iterator[str]:
    if recipe.status == "untested":
        yield f"the recipe {recipe.name} is untested on the hardware that it names"
    for name, connector in connectors.items():
        if isinstance(connector, RawSection):
            yield f"the connector of {name} is raw: unverified, nothing about it was checked"
        for class_name in untested_connectors(class_names(connector)):
            yield f"{class_name} of {name} is untested: no device that it needs was at hand (docs/limits.md)"
    yield from lmcache.rocm_warnings(recipe)
    for instance in instances:
        if moves_kv_to_host(recipe, instance) and kv_gib_on_cpu(recipe, instance) is None:
            yield (
                f"{instance.name} moves its KV into /dev/shm (lmcache_driven on a CPU), and without "
                "VLLM_CPU_KVCACHE_SPACE its size is not known"
            )


EVERYWHERE = "0.0.0.0"
RANDOM_PORT = 0


def open_ports(
    recipe: Recipe,
    nodes: Sequence[Node],
    instances: Sequence[Instance],
    servers: Sequence[CacheServer],
    ports: AssignedPorts,
    proxy: ProxyConfig,
) -> tuple[Exposure, ...]:
    """Return the open ports in process order, the proxy's last."""
    return (
        *(entry for server in servers for entry in _server_ports(server, ports)),
        *mooncake_store.master_exposures(recipe, nodes, ports),
        *(entry for instance in instances for entry in _instance_ports(recipe, instance, ports)),
        *(_router_ports(proxy, ports) if recipe.proxy.kind == "vllm-router" else _proxy_ports(proxy)),
    )


def _proxy_ports(proxy: ProxyConfig) -> Iterator[Exposure]:
    who = "clients need no key" if proxy.auth.keys_file is None else "clients need a key"
    yield Exposure(process="proxy", address=proxy.host, port=proxy.port, what=f"the OpenAI API: {who}")
    if proxy.admin is not None and proxy.admin.port is not None:
        who = "asks for no token" if proxy.admin.token_file is None else "asks for its token"
        what = f"admin of the proxy: workers, reloading; {who}"
        yield Exposure(process="proxy", address=proxy.admin.host, port=proxy.admin.port, what=what)


def _router_ports(proxy: ProxyConfig, ports: AssignedPorts) -> Iterator[Exposure]:
    yield Exposure(
        process="proxy",
        address=proxy.host,
        port=proxy.port,
        what="the OpenAI API and the router's own endpoints, which remove workers: clients need no key",
    )
    yield Exposure(
        process="proxy", address=ROUTER_METRICS_HOST, port=ports.first("proxy", "metrics"), what="figures of the router"
    )


def _server_ports(server: CacheServer, ports: AssignedPorts) -> Iterator[Exposure]:
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


def _instance_ports(recipe: Recipe, instance: Instance, ports: AssignedPorts) -> Iterator[Exposure]:
    open_paths = "/metrics, /health, /load, /tokenize (the key guards /v1 and /inference)"
    if recipe.engine.cache_reset_endpoint:
        open_paths += "; development endpoints: reset, sleep, abort, remote calls to workers"
    for rank, share in enumerate(instance.shares):
        process, address = instance.process_name(rank), share.node.address
        if http := ports.range(process, "http"):
            yield Exposure(process=process, address=address, port=http.start, what=open_paths)
        yield from _connector_ports(recipe, instance, process, address, ports)
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


def _connector_ports(
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
