"""Connectors of a recipe -> the mapping for vLLM's --kv-transfer-config, built as data.

Facts that shape it (vLLM 0.26-0.33, lmcache 0.5.6): `kv_load_failure_policy` is read from the top level only; a child
of MultiConnector must not have an engine_id ("got multiple values"); every child needs its own kv_role; the host that
LMCache's client gets is a ZMQ endpoint, the server's is bare; a kv_consumer never stores, so LMCache is kv_both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pdserve.errors import RecipeError
from pdserve.patches.registry import find
from pdserve.recipe import effective
from pdserve.recipe.effective import AnyConnector
from pdserve.recipe.model import Recipe, Role
from pdserve.recipe.sections.connectors import LmcacheMp, Mooncake, Nixl, Raw
from pdserve.recipe.sections.lmcache import RoleName

Config = dict[str, Any]
Protocol = Literal["mooncake", "nixl", "aggregated"]

LMCACHE_MODULE = "lmcache.integration.vllm.lmcache_mp_connector"
"""Named explicitly: vLLM's own class of that name cannot talk to lmcache 0.5.x."""

CONNECTOR_MODULES = {
    "MultiConnector": "pdserve.connectors.multi",
    "LMCacheMPConnector": "pdserve.connectors.lmcache_mp",
}
"""Our subclasses; upstream asks for connectors by class name in several places, so they keep it."""

_KV_ROLE: dict[RoleName, str] = {"prefill": "kv_producer", "decode": "kv_consumer", "aggregated": "kv_both"}


@dataclass(frozen=True)
class Context:
    """What a connector's mapping depends on beside its own section."""

    recipe: Recipe
    role_name: RoleName
    lmcache_ports: tuple[int, ...]
    """Request ports of the node's LMCache servers, in TP-rank order; empty: none is attached."""
    patches: tuple[str, ...] = ()
    """Patches of the role's engines: those that are subclasses are loaded instead of vLLM's own connectors."""

    @property
    def kv_role(self) -> str:
        return _KV_ROLE[self.role_name]


def kv_transfer_config(connector: AnyConnector, role: Role, context: Context) -> Config:
    """The whole mapping. Raises RecipeError for a connector that this role cannot have."""
    if isinstance(connector, Raw):
        return dict(connector.config)
    children = [_leaf(leaf, context) for leaf in effective.leaves(connector)]
    if len(children) == 1:
        config = children[0]
    else:
        config = {
            "kv_connector": "MultiConnector",
            **_module("MultiConnector", context, upstream=None),
            "kv_role": context.kv_role,
            "kv_connector_extra_config": {"connectors": children},
        }
    if role.load_timeout_seconds is not None:
        config["kv_connector_extra_config"]["load_timeout_seconds"] = role.load_timeout_seconds
    return {**config, "kv_load_failure_policy": failure_policy(connector, role)}


def _module(class_name: str, context: Context, *, upstream: str | None) -> Config:
    """Where vLLM finds the class: ours, of the same name, where a patch of the role is one; else upstream's module."""
    ours = any(find(name).vehicle == "subclass" and class_name in find(name).connectors for name in context.patches)
    module = CONNECTOR_MODULES[class_name] if ours else upstream
    return {} if module is None else {"kv_connector_module_path": module}


def failure_policy(connector: AnyConnector, role: Role) -> str:
    """Recompute where LMCache may lose what it promised; otherwise fail, so that the proxy can say so."""
    return role.kv_load_failure_policy or ("recompute" if attaches_lmcache(connector) else "fail")


def class_names(connector: AnyConnector | None) -> frozenset[str]:
    """vLLM's class names of the connector and its children: what patches and known defects are about."""
    if connector is None:
        return frozenset()
    if isinstance(connector, Raw):
        return frozenset(_raw_names(connector.config))
    leaves = effective.leaves(connector)
    names = {_REGISTRY[type(leaf)].class_name for leaf in leaves}
    return frozenset(names | {"MultiConnector"} if len(leaves) > 1 else names)


def attaches_lmcache(connector: AnyConnector | None) -> bool:
    """Whether engines with this connector register at the node's LMCache server."""
    return "LMCacheMPConnector" in class_names(connector)


def proxy_protocol(recipe: Recipe) -> Protocol:
    """How the proxy moves KV between the roles. Raises RecipeError when they do not agree or none is known."""
    if recipe.mode == "aggregated":
        return "aggregated"
    per_role = {name: _protocols(connector) for name, _, connector in effective.roles(recipe)}
    common = per_role["prefill"] & per_role["decode"]
    if len(common) == 1:
        return next(iter(common))
    described = ", ".join(f"{name}: {' and '.join(sorted(found)) or 'none'}" for name, found in per_role.items())
    raise RecipeError(
        f"prefill and decode must share exactly one way of moving KV ({described})",
        where="decode.connector",
        todo="give both roles a mooncake connector, or both a nixl one (inside multi, or raw of those classes)",
    )


def _protocols(connector: AnyConnector | None) -> set[Literal["mooncake", "nixl"]]:
    names = class_names(connector)
    found: set[Literal["mooncake", "nixl"]] = set()
    if "MooncakeConnector" in names:
        found.add("mooncake")
    if "NixlConnector" in names:
        found.add("nixl")
    return found


def _mooncake(leaf: Mooncake, context: Context) -> Config:
    extra: Config = {"mooncake_protocol": leaf.protocol, "num_workers": leaf.num_workers}
    if leaf.device_name:
        extra["device_name"] = leaf.device_name
    return {"kv_connector": "MooncakeConnector", "kv_role": context.kv_role, "kv_connector_extra_config": extra}


def _nixl(leaf: Nixl, context: Context) -> Config:
    """kv_both is deprecated for NIXL since vLLM 0.32: the role's own side is named."""
    config: Config = {"kv_connector": "NixlConnector", "kv_role": context.kv_role}
    buffer_device = leaf.buffer_device or ("cpu" if context.recipe.platform == "cpu" else None)
    if buffer_device:
        config["kv_buffer_device"] = buffer_device
    config["kv_connector_extra_config"] = {"backends": list(leaf.backends), "kv_lease_duration": leaf.lease_seconds}
    return config


def _lmcache_mp(leaf: LmcacheMp, context: Context) -> Config:
    section = context.recipe.lmcache
    if section is None or not context.lmcache_ports:
        raise RecipeError(
            f"{context.role_name} uses lmcache-mp, but no LMCache server is planned for it",
            where=f"{context.role_name}.connector",
            todo=f"add an lmcache section whose `on` lists {context.role_name}, or take lmcache-mp out",
        )
    extra: Config = (
        {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": context.lmcache_ports[0]}
        if section.per == "node"
        else {"lmcache.mp.server_urls": [f"tcp://127.0.0.1:{port}" for port in context.lmcache_ports]}
    )
    extra["lmcache.mp.mq_timeout"] = section.mq_timeout_seconds
    extra["lmcache.mp.heartbeat_interval"] = section.heartbeat_seconds
    # Never left to `auto`: a pair that resolves differently hangs until mq_timeout and then blames the network.
    extra["lmcache.mp.mp_transfer_mode"] = effective.transfer_mode_of(context.recipe, leaf)[1]
    if leaf.max_tokens_per_load is not None:
        extra["pdserve.max_tokens_per_load"] = leaf.max_tokens_per_load
    if leaf.min_load_tokens is not None:
        extra["pdserve.min_load_tokens"] = leaf.min_load_tokens
    return {
        "kv_connector": "LMCacheMPConnector",
        **_module("LMCacheMPConnector", context, upstream=LMCACHE_MODULE),
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }


@dataclass(frozen=True)
class _Kind:
    class_name: str
    build: Callable[[Any, Context], Config]


_REGISTRY: Mapping[type, _Kind] = {
    Mooncake: _Kind("MooncakeConnector", _mooncake),
    Nixl: _Kind("NixlConnector", _nixl),
    LmcacheMp: _Kind("LMCacheMPConnector", _lmcache_mp),
}


def _leaf(leaf: Mooncake | Nixl | LmcacheMp | Raw, context: Context) -> Config:
    if context.role_name == "aggregated" and not isinstance(leaf, LmcacheMp):
        raise RecipeError(
            f"{_REGISTRY[type(leaf)].class_name} moves KV between prefill and decode; an aggregated engine has neither",
            where="aggregated.connector",
            todo="use lmcache-mp alone, or mode: disaggregated",
        )
    config = _REGISTRY[type(leaf)].build(leaf, context)
    if not isinstance(leaf, Raw) and leaf.load_weight is not None:
        config["kv_connector_extra_config"]["load_weight"] = leaf.load_weight
    return config


def _raw_names(config: Mapping[str, Any]) -> Iterator[str]:
    name = config.get("kv_connector")
    if isinstance(name, str):
        yield name
    extra = config.get("kv_connector_extra_config")
    children = extra.get("connectors") if isinstance(extra, Mapping) else None
    for child in children if isinstance(children, list) else ():
        if isinstance(child, Mapping):
            yield from _raw_names(child)
