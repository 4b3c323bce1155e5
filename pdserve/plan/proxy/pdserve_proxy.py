"""The proxy's part of the plan."""

from __future__ import annotations

import posixpath
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel

from pdserve.pd.config.proxy import Protocol, ProxyConfig, WorkerConfig
from pdserve.pd.config.serving import Serving
from pdserve.plan.environment import proxy_env
from pdserve.plan.nodes.node import Node
from pdserve.plan.nodes.placement import Instance
from pdserve.plan.ports import AssignedPorts, Need
from pdserve.plan.process import HttpProbe, Process
from pdserve.recipe import effective
from pdserve.recipe.connectors.registry import SECTIONS
from pdserve.recipe.model import Recipe

Section = TypeVar("Section", bound=BaseModel)

NAME = "proxy"
CONFIG_FILE = "proxy.json"
START_STAGE = 1
STOP_STAGE = 0
EXIT_SECONDS = 5.0
WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}


def port_needs(recipe: Recipe, node: Node) -> Iterator[Need]:
    """The proxy's port, and that of its admin endpoints; it runs on the first node."""
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
    """The proxy's configuration: every API server of every instance, by its node's address. Files of the recipe are
    relative to `recipe_dir`, the admin socket to the run directory."""
    proxy = recipe.proxy
    located: dict[str, Any] = {
        "auth": _located(proxy.auth, recipe_dir, "keys_file"),
        "tls": proxy.tls and _located(proxy.tls, recipe_dir, "certificate", "key"),
        "upstream_tls": proxy.upstream_tls and _located(proxy.upstream_tls, recipe_dir, "ca", "certificate", "key"),
        "admin": proxy.admin and _located(_located(proxy.admin, recipe_dir, "token_file"), run_dir, "socket"),
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
    """The proxy, on `node`. It answers from its first second, and routes once a worker is reported ready."""
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


def _located(section: Section, folder: str, *fields: str) -> Section:
    """The section with its paths as seen from `folder`."""
    paths = {field: path for field in fields if (path := getattr(section, field)) is not None}
    return section.model_copy(
        update={field: posixpath.normpath(posixpath.join(folder, path)) for field, path in paths.items()}
    )


def _workers(instance: Instance, ports: AssignedPorts) -> Iterator[WorkerConfig]:
    """One for each API server of the instance."""
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
    """Of prefill's connector. Of a raw one nothing is known: the defaults of all connectors are taken to hold."""
    # Constructed with its defaults alone: a section may have keys without one.
    defaults = [section.model_construct().proxy_settings() for section in SECTIONS]
    settings = {key: value for section in defaults for key, value in section.items()}
    prefill = next((connector for name, _, connector in effective.roles(recipe) if name == "prefill"), None)
    transfer = effective.transfer_of(prefill)
    return settings if transfer is None else {**settings, **transfer.proxy_settings()}


def _url(address: str, port: int, scheme: str = "http") -> str:
    return f"{scheme}://[{address}]:{port}" if ":" in address else f"{scheme}://{address}:{port}"
