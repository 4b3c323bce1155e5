"""Connectors of a recipe -> the mapping for vLLM's --kv-transfer-config, built as data.

Facts that shape it (vLLM 0.26-0.33, lmcache 0.5.6): `kv_load_failure_policy` is read from the top level only; a child
of MultiConnector must not have an engine_id ("got multiple values"); every child needs its own kv_role; the host that
LMCache's client gets is a ZMQ endpoint, the server's is bare; a kv_consumer never stores, so LMCache is kv_both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pdserve.errors import RecipeError
from pdserve.patches.registry import find
from pdserve.pd.config.proxy import Protocol
from pdserve.plan.process import PlannedConnector
from pdserve.recipe import effective
from pdserve.recipe.connectors.base import Config, Context
from pdserve.recipe.connectors.registry import (
    KINDS,
    MULTI_CLASS,
    AnyConnector,
    AnyLeaf,
    RawSection,
    kinds_of,
    leaf_configs,
    transfer_kinds,
)
from pdserve.recipe.model import Recipe, Role

CONNECTOR_MODULES = {
    "MultiConnector": "pdserve.connectors.multi",
    "LMCacheMPConnector": "pdserve.connectors.lmcache_mp",
    "MoRIIOConnector": "pdserve.connectors.moriio",
}
"""Our subclasses; upstream asks for connectors by class name in several places, so they keep it."""


def modules_of(patches: Sequence[str]) -> Mapping[str, str]:
    """Class name -> module of our subclass of it, where one of these patches is that subclass."""
    replaced = {name for patch in map(find, patches) if patch.vehicle == "subclass" for name in patch.connectors}
    return {name: module for name, module in CONNECTOR_MODULES.items() if name in replaced}


def kv_transfer_config(connector: AnyConnector, role: Role, context: Context) -> Config:
    """The whole mapping. Raises RecipeError for a connector that this role cannot have."""
    if isinstance(connector, RawSection):
        return dict(connector.config)
    children = [_leaf(leaf, context) for leaf in effective.leaves(connector) if not isinstance(leaf, RawSection)]
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
    """What an engine with this mapping and these environment variables loads. `store_devices`: the RDMA devices that
    the section of a Mooncake store names, which are in no mapping."""
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
    """How the proxy moves KV between the roles. Raises RecipeError when they do not agree or none is known."""
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
