"""A Mooncake store and the connectors that use it, and what holds for every connector that keeps KV."""

from __future__ import annotations

from collections.abc import Iterator

from pdserve.recipe.connectors.mooncake import MooncakeSection
from pdserve.recipe.connectors.mooncake_store import MooncakeStoreSection
from pdserve.recipe.connectors.registry import MultiSection, uses_store
from pdserve.recipe.effective import args_of, env_of, roles, sections
from pdserve.recipe.load.problems import Path, Problem
from pdserve.recipe.model import Recipe
from pdserve.recipe.rules.engines import env_path, flag_path

_CONFIG = "MOONCAKE_CONFIG_PATH"
MASTER_FLAGS = {
    "rpc_port": "set ports.mooncake_master",
    "port": "set ports.mooncake_master",
    "metrics_port": "set ports.mooncake_master_http",
    "rpc_address": "it is the address of the first node",
    "rpc_interface": "it is the address of the first node",
    "metrics_host": "its HTTP side has no key and stays on loopback",
    "enable_ha": "the deployment has one master, and starts it again",
    "config_path": "write the flags of that file under extra_args",
}
"""Flags of mooncake_master that pdserve sets itself, and what to write instead."""


def attachment(recipe: Recipe) -> Iterator[Problem]:
    """The section and the roles' connectors have to agree."""
    users = [name for name, _, connector in roles(recipe) if uses_store(connector)]
    if recipe.mooncake_store is not None and not users:
        yield Problem(
            ("mooncake_store",),
            "no connector uses the store",
            "give a role the connector mooncake-store (alone or in multi), or remove the section",
        )
    for name, role, connector in roles(recipe):
        path = store_path(name, connector)
        if path is None:
            continue
        if recipe.mooncake_store is None:
            yield Problem(path, "there is no mooncake_store section", "add one with segment_gib, or remove this")
            continue
        if _CONFIG in env_of(recipe, role):
            yield Problem(
                env_path(recipe, name, _CONFIG),
                "pdserve writes this file from the mooncake_store section",
                "remove it",
                also=(("mooncake_store",),),
            )
        for leaf in sections(connector):
            if isinstance(leaf, MooncakeSection) and leaf.protocol != recipe.mooncake_store.protocol:
                yield Problem(
                    path,
                    f"the store uses {recipe.mooncake_store.protocol}, mooncake beside it {leaf.protocol}: both share "
                    "the variables of one process",
                    "use the same protocol for both",
                    also=(("mooncake_store", "protocol"),),
                )


def master_flags(recipe: Recipe) -> Iterator[Problem]:
    """Flags of the master that pdserve sets itself."""
    if recipe.mooncake_store is None:
        return
    for flag in recipe.mooncake_store.extra_args:
        path: Path = ("mooncake_store", "extra_args", flag)
        name = flag.replace("-", "_")
        if name in MASTER_FLAGS:
            yield Problem(path, "pdserve sets this flag", MASTER_FLAGS[name])
        elif name != flag:
            yield Problem(path, "flags of mooncake_master have underscores", f"write {name.strip('_')}")


def one_cache(recipe: Recipe) -> Iterator[Problem]:
    """Two children that keep the same KV: every prompt is stored twice, and only the first one that has it loads."""
    for name, _, connector in roles(recipe):
        if not isinstance(connector, MultiSection):
            continue
        kinds = [leaf.kind for leaf in connector.of if leaf.ABOUT.caches]
        if len(set(kinds)) > 1:
            yield Problem(
                (name, "connector"),
                f"{' and '.join(dict.fromkeys(kinds))} together: each stores every prompt, and a prompt is loaded from "
                "one of them only",
                "keep one of them",
            )


def caching(recipe: Recipe) -> Iterator[Problem]:
    """The other caches' rule; LMCache has its own words for it."""
    for name, role, connector in roles(recipe):
        kinds = [leaf.kind for leaf in sections(connector) if leaf.ABOUT.caches and not leaf.ABOUT.attaches_lmcache]
        if kinds and args_of(recipe, role).get("enable-prefix-caching") is False:
            yield Problem(
                flag_path(recipe, name, "enable-prefix-caching"),
                f"{kinds[0]} keeps KV by the block hashes that prefix caching makes",
                f"remove the flag, or {kinds[0]} from the connector",
                also=((name, "connector"),),
            )


def store_path(name: str, connector: object) -> Path | None:
    """Where a role has its mooncake-store, if it has one."""
    if isinstance(connector, MooncakeStoreSection):
        return (name, "connector")
    if isinstance(connector, MultiSection):
        for index, leaf in enumerate(connector.of):
            if isinstance(leaf, MooncakeStoreSection):
                return (name, "connector", "of", index)
    return None
