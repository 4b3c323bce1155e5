"""What the checks must know of a plan: pure, and read from what is really started."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from pdserve.plan.model import Plan, Process

ENGINE_ROLES = ("prefill", "decode", "aggregated")
_PACKAGES = {"MooncakeConnector": "mooncake", "NixlConnector": "nixl", "LMCacheMPConnector": "lmcache"}
_KV_TRANSFER = "--kv-transfer-config"


def on_node(plan: Plan, node: str) -> tuple[Process, ...]:
    """The processes of a node, in plan order."""
    return tuple(process for process in plan.processes if process.node == node)


def address_of(plan: Plan, node: str) -> str:
    """KeyError if the plan has no such node."""
    for one in plan.nodes:
        if one.name == node:
            return one.address
    raise KeyError(node)


def connectors(process: Process) -> list[dict[str, Any]]:
    """The KV connectors of an engine, children of a MultiConnector instead of itself."""
    if _KV_TRANSFER not in process.argv:
        return []
    return list(_leaves(json.loads(process.argv[process.argv.index(_KV_TRANSFER) + 1])))


def _leaves(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    children = _extra(config).get("connectors")
    if isinstance(children, list):
        for child in children:
            yield from _leaves(child)
    else:
        yield config


def _extra(config: dict[str, Any]) -> dict[str, Any]:
    found = config.get("kv_connector_extra_config")
    return found if isinstance(found, dict) else {}


def rdma_devices(process: Process) -> tuple[str, ...] | None:
    """The RDMA devices that an engine is given, none when it may choose; None: it moves KV without RDMA.

    Mooncake's protocol is rdma by default. NIXL is not here: UCX takes what it finds.
    """
    if process.env.set.get("MC_FORCE_TCP") == "1":
        return None
    for config in connectors(process):
        extra = _extra(config)
        if config.get("kv_connector") == "MooncakeConnector" and extra.get("mooncake_protocol", "rdma") == "rdma":
            names = str(extra.get("device_name", "")).split(",")
            return tuple(name.strip() for name in names if name.strip())
    return None


def transfer_ports(process: Process) -> range:
    """The range from which Mooncake's transfer engine takes its ports; empty without one."""
    setting = process.env.set
    if "MC_MIN_RPC_PORT" not in setting or "MC_MAX_RPC_PORT" not in setting:
        return range(0)
    return range(int(setting["MC_MIN_RPC_PORT"]), int(setting["MC_MAX_RPC_PORT"]) + 1)


def packages(process: Process) -> frozenset[str]:
    """The engine packages that a process loads. A command of the recipe's own may load anything: none is returned."""
    modules = [word for word in process.argv if word.startswith(("vllm.", "lmcache.", "pdserve.patches."))]
    if process.role == "lmcache":
        return frozenset({"lmcache"} if modules else ())
    if process.role not in ENGINE_ROLES or not modules:
        return frozenset()
    loaded = (_PACKAGES.get(str(config.get("kv_connector"))) for config in connectors(process))
    return frozenset({"vllm", *filter(None, loaded)})
