"""The proxy of a plan: pdserve's own, or vllm-router in its place.

vllm-router, measured on the wheel of 0.1.17: before it listens it waits for /health of every engine and reads the
engine ids of each prefill from Mooncake's bootstrap server. It ends when an engine is not there in time, and finds data
parallel ranks in the engines' metrics. The engines' key it takes from OPENAI_API_KEY, in place of the client's
Authorization.
"""

from __future__ import annotations

import math
import posixpath
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar
from urllib.parse import urlsplit

from pydantic import BaseModel

from pdserve.pd.config.proxy import Protocol, ProxyConfig, WorkerConfig
from pdserve.pd.config.serving import Serving
from pdserve.plan.environment import proxy_env, vllm_router_env
from pdserve.plan.node import Node, Srun
from pdserve.plan.placement import Instance
from pdserve.plan.ports import AssignedPorts, Need
from pdserve.plan.process import HttpProbe, Process
from pdserve.recipe import effective
from pdserve.recipe.connectors.registry import SECTIONS
from pdserve.recipe.model import ROUTER_DEFAULT_POLICY, ROUTER_POLICIES, Recipe

Section = TypeVar("Section", bound=BaseModel)

NAME = "proxy"
CONFIG_FILE = "proxy.json"
START_STAGE = 1
STOP_STAGE = 0
EXIT_SECONDS = 5.0
WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}


def proxy_port_needs(recipe: Recipe, node: Node) -> Iterator[Need]:
    """Yield the proxy's port, and that of its admin endpoints; it runs on the first node."""
    yield Need(node.name, NAME, "proxy", role="proxy")
    admin = recipe.proxy.admin
    if admin is not None and admin.port is not None:
        yield Need(node.name, NAME, "proxy.admin.port", port=admin.port, role="proxy")


def proxy_config(
    recipe: Recipe,
    protocol: Protocol,
    instances: Sequence[Instance],
    ports: AssignedPorts,
    *,
    recipe_dir: str,
    run_dir: str,
) -> ProxyConfig:
    """Return the proxy's configuration: every API server of every instance, by its node's address. Files of the recipe
    are relative to `recipe_dir`, the admin socket to the run directory."""
    proxy = recipe.proxy
    located: dict[str, Any] = {
        "auth": _with_paths(proxy.auth, recipe_dir, "keys_file"),
        "tls": proxy.tls and _with_paths(proxy.tls, recipe_dir, "certificate", "key"),
        "upstream_tls": proxy.upstream_tls and _with_paths(proxy.upstream_tls, recipe_dir, "ca", "certificate", "key"),
        "admin": proxy.admin and _with_paths(_with_paths(proxy.admin, recipe_dir, "token_file"), run_dir, "socket"),
    }
    return ProxyConfig(
        **{name: getattr(proxy, name) for name in Serving.model_fields.keys() - located.keys()},
        **located,
        port=ports.first(NAME, "http"),
        served_name=recipe.model.served_name,
        protocol=protocol,
        workers=tuple(worker for instance in instances for worker in _workers(instance, ports)),
        **_connector_settings(recipe),
        processes=proxy.workers,
    )


def proxy_process(recipe: Recipe, node: Node, config: ProxyConfig, *, run_dir: str, python: str) -> Process:
    """Return the process of the proxy, on `node`. It answers from its first second, and routes once a worker is
    reported ready."""
    program = recipe.proxy.command if recipe.proxy.command is not None else [python, "-m", "pdserve.proxy"]
    host = WILDCARDS.get(config.host, config.host)
    return Process(
        name=NAME,
        role="proxy",
        node=node.name,
        argv=(*program, "--config", f"{run_dir}/{CONFIG_FILE}"),
        env=proxy_env(),
        ports={"http": config.port, **({"admin": config.admin.port} if config.admin and config.admin.port else {})},
        log=f"logs/{NAME}@{node.name}.log",
        files={CONFIG_FILE: config.model_dump_json(indent=2) + "\n"},
        probe=HttpProbe(host=host, port=config.port, path="/health", scheme="http" if config.tls is None else "https"),
        start_stage=START_STAGE,
        stop_stage=STOP_STAGE,
        ready_seconds=recipe.timeouts.proxy_seconds,
        stop_seconds=max(recipe.timeouts.stop_seconds, recipe.proxy.drain_seconds + EXIT_SECONDS),
        control="stdin",
        restart=recipe.proxy.restart,
    )


def _with_paths(section: Section, folder: str, *fields: str) -> Section:
    """Return the section with its paths as seen from `folder`."""
    paths = {field: path for field in fields if (path := getattr(section, field)) is not None}
    return section.model_copy(
        update={field: posixpath.normpath(posixpath.join(folder, path)) for field, path in paths.items()}
    )


def _workers(instance: Instance, ports: AssignedPorts) -> Iterator[WorkerConfig]:
    """Yield a worker for each API server of the instance."""
    events = ports.range(instance.name, "kv_events")
    for rank, share in enumerate(instance.shares):
        if not instance.has_server(rank):
            continue
        name, address = instance.process_name(rank), share.node.address
        bootstrap = ports.range(name, "bootstrap")
        yield WorkerConfig(
            name=name,
            role=instance.role_name,
            url=_url(address, ports.first(name, "http")),
            bootstrap_url=_url(address, bootstrap.start) if bootstrap else None,
            ranks=instance.role.parallel.ranks_of_server,
            kv_events_url=_url(address, events[0], "tcp") if events else None,
            kv_replay_url=_url(address, events[len(events) // 2], "tcp") if events else None,
        )


def _connector_settings(recipe: Recipe) -> dict[str, Any]:
    """Return the settings by prefill's connector. Of a raw one nothing is known: the defaults of all connectors are
    taken to hold."""
    # Constructed with its defaults alone: a section may have keys without one.
    defaults = [section.model_construct().proxy_settings() for section in SECTIONS]
    settings = {key: value for section in defaults for key, value in section.items()}
    prefill = next((connector for name, _, connector in effective.roles(recipe) if name == "prefill"), None)
    transfer = effective.first_transfer_of(prefill)
    return settings if transfer is None else {**settings, **transfer.proxy_settings()}


def _url(address: str, port: int, scheme: str = "http") -> str:
    return f"{scheme}://[{address}]:{port}" if ":" in address else f"{scheme}://{address}:{port}"


ROUTER_VERSION = "0.1.17"
"""The flags below are those of this version."""
ROUTER_MODULE = "vllm_router.launch_router"
ROUTER_PACKAGE = "vllm-router"
ROUTER_START_STAGE = 2
"""After the engines: it ends by itself when they take longer than it waits."""
ROUTER_METRICS_HOST = "127.0.0.1"


def router_metrics_need(node: Node) -> Need:
    """Return the port of its figures, which cannot be turned off."""
    return Need(node.name, NAME, "router_metrics", role="proxy")


def router_process(recipe: Recipe, node: Node, config: ProxyConfig, ports: AssignedPorts, *, python: str) -> Process:
    """Return the process of vllm-router, on `node`. It does not get worker states from the launcher."""
    program = recipe.proxy.command if recipe.proxy.command is not None else [python, "-m", ROUTER_MODULE]
    return Process(
        name=NAME,
        role="proxy",
        node=node.name,
        argv=(*program, *_router_arguments(recipe, config, ports)),
        env=vllm_router_env(),
        ports=ports.pinned(NAME),
        log=f"logs/{NAME}@{node.name}.log",
        # /health says 503 while it finds an engine unhealthy, which is no fault of its own.
        probe=HttpProbe(host=WILDCARDS.get(config.host, config.host), port=config.port, path="/liveness"),
        start_stage=ROUTER_START_STAGE,
        stop_stage=STOP_STAGE,
        ready_seconds=recipe.timeouts.proxy_seconds,
        stop_seconds=max(recipe.timeouts.stop_seconds, config.drain_seconds + EXIT_SECONDS),
        restart=recipe.proxy.restart,
        packages=(ROUTER_PACKAGE,) if recipe.proxy.command is None else (),
    )


def _router_arguments(recipe: Recipe, config: ProxyConfig, ports: AssignedPorts) -> Iterator[str]:
    yield from ("--host", config.host, "--port", str(config.port))
    yield from ("--vllm-pd-disaggregation", "--kv-connector", config.protocol)
    for worker in config.workers:
        yield from (f"--{worker.role}", worker.url)
        if worker.bootstrap_url is not None:
            yield str(urlsplit(worker.bootstrap_url).port)
    yield from (
        "--prefill-policy",
        _router_policy(recipe, "prefill"),
        "--decode-policy",
        _router_policy(recipe, "decode"),
    )
    yield from ("--request-timeout-secs", f"{config.request_timeout_seconds:.0f}")
    yield from ("--max-payload-size", str(config.max_body_bytes))
    yield from ("--health-check-interval-secs", f"{config.health.interval_seconds:.0f}")
    yield from ("--health-check-timeout-secs", f"{config.health.timeout_seconds:.0f}")
    yield from ("--health-failure-threshold", str(config.health.failures))
    yield from ("--worker-startup-timeout-secs", str(math.ceil(recipe.timeouts.proxy_seconds)))
    yield from ("--worker-startup-check-interval", "1")
    yield from ("--prometheus-host", ROUTER_METRICS_HOST, "--prometheus-port", str(ports.first(NAME, "metrics")))


def _router_policy(recipe: Recipe, pool: str) -> str:
    """Return the flag's policy. With one worker the router refuses power_of_two, and every policy is the same."""
    if dict(recipe.roles())[pool].instances == 1:  # type: ignore[index]
        return "round_robin"
    routing = recipe.proxy.routing
    chosen = getattr(routing, pool).kind if pool in routing.model_fields_set else ROUTER_DEFAULT_POLICY
    return ROUTER_POLICIES[chosen]


_LOOPBACK = ("127.0.0.1", "localhost", "::1")


def loopback_warnings(recipe: Recipe, nodes: Sequence[Node]) -> Iterator[str]:
    """Warn of a job whose proxy is on loopback. On one machine loopback is right: its users are the clients. A job's
    nodes are the scheduler's choice, and its clients are on the login node or on other nodes. Once the proxy is open to
    them, only its keys decide who may ask: `allowed_hosts` is about names in requests, not about the machines that they
    come from."""
    slurm = bool(recipe.slurm.model_fields_set) or any(isinstance(node.reach, Srun) for node in nodes)
    if len(nodes) < 2 or not slurm or recipe.proxy.host not in _LOOPBACK:
        return
    opened = "proxy.host: 0.0.0.0"
    if recipe.proxy.kind == "pdserve":
        opened += " with proxy.auth.keys_file (pdserve new-key NAME --file FILE), which then decides who may ask"
    else:
        opened += ", behind a firewall or a gateway: vllm-router asks for no key"
    yield (
        f"the proxy listens on {recipe.proxy.host} of {nodes[0].name}, the first node of the job: no client on the "
        f"login node or on another node reaches it; set {opened}, or run the clients on that node"
    )
