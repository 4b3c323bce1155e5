"""Rules of LMCache servers and of a Mooncake store."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from pdserve.recipe.connectors.caches import LmcacheMpSection
from pdserve.recipe.connectors.mooncake import MooncakeSection, MooncakeStoreSection
from pdserve.recipe.connectors.registry import AnyConnector, MultiSection, uses_store
from pdserve.recipe.effective import (
    args_of,
    block_size_of,
    env_of,
    leaf_connectors,
    lmcache_leaves,
    roles,
    sections,
    stated_kv_bytes,
    transfer_mode_of,
)
from pdserve.recipe.flags import SERVER_FLAGS
from pdserve.recipe.load.problems import Line, Path, Problem
from pdserve.recipe.model import Recipe
from pdserve.recipe.rules.engines import env_path, flag_path

_ALLOCATOR_ENV = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


def lmcache_attachment(recipe: Recipe) -> Iterator[Problem]:
    """Check who uses LMCache. `lmcache.on` and the roles' connectors have to agree."""
    section = recipe.lmcache
    names = [name for name, _ in recipe.roles()]
    for name, _, connector in roles(recipe):
        path = _lmcache_path(name, connector)
        if path is not None and section is None:
            yield Problem(path, "there is no lmcache section", "add one with l1_size_gb, or remove lmcache-mp")
        elif path is not None and section is not None and name not in section.on:
            risk = (
                ": on decode its lookup competes with the KV from prefill, so it is opt-in" if name == "decode" else ""
            )
            yield Problem(
                path,
                f"{name} is not in lmcache.on{risk}",
                f"remove lmcache-mp here, or add {name} to lmcache.on",
                also=(("lmcache", "on"),),
            )
        elif path is None and section is not None and name in section.on:
            yield Problem(
                ("lmcache", "on"),
                f"{name} is listed, but its connector has no lmcache-mp, so nothing would attach",
                f"add lmcache-mp to {name}.connector, or remove {name} here",
                also=((name, "connector"),),
            )
    if section is None:
        return
    for i, name in enumerate(section.on):
        if name not in names:
            where: Path = ("lmcache", "on", i) if "on" in section.model_fields_set else ("lmcache", "on")
            yield Problem(
                where,
                f"mode {recipe.mode} has no role {name}",
                also=(("mode",),),
                write=Line(("lmcache", "on"), f"[{names[0]}]"),
            )
        if name in section.on[:i]:
            yield Problem(("lmcache", "on", i), f"{name} is there twice")


def lmcache_sizes(recipe: Recipe) -> Iterator[Problem]:
    """Check numbers of the section that depend on each other or on the engines."""
    section = recipe.lmcache
    if section is None:
        return
    for name, role, connector in roles(recipe):
        if _lmcache_path(name, connector) is None:
            continue
        block = block_size_of(recipe, role)
        if section.chunk_size % block:
            stated = "block-size" in args_of(recipe, role)
            why = "" if stated else f", vLLM's default on {recipe.platform}"
            yield Problem(
                ("lmcache", "chunk_size"),
                f"{section.chunk_size} is not a multiple of the block size of {name} ({block}{why})",
                f"use a multiple of {block}",
                also=(flag_path(recipe, name, "block-size"),) if stated else (),
                write=Line(("lmcache", "chunk_size"), str(max(256 // block, 1) * block), example=True),
            )
        parallel = role.parallel
        if section.per == "tp-rank" and (parallel.dp > 1 or parallel.pp > 1):
            yield Problem(
                ("lmcache", "per"),
                f"tp-rank works with tensor parallelism alone, and {name} has pp {parallel.pp} and dp {parallel.dp}",
                "use per: node",
                also=((name, "parallel"),),
            )
    if "l1_init_size_gb" in section.model_fields_set and section.l1_init_size_gb > section.l1_size_gb:
        yield Problem(
            ("lmcache", "l1_init_size_gb"),
            f"{section.l1_init_size_gb:g} is more than the whole of L1, {section.l1_size_gb:g}",
            also=(("lmcache", "l1_size_gb"),),
            write=Line(("lmcache", "l1_init_size_gb"), f"{section.l1_size_gb:g}", example=True),
        )
    if 3 * section.heartbeat_seconds > section.worker_reap_seconds:
        yield Problem(
            ("lmcache", "heartbeat_seconds"),
            f"three heartbeats take {3 * section.heartbeat_seconds:g} s, and the server forgets an engine after "
            f"{section.worker_reap_seconds:g} s",
            "lower heartbeat_seconds or raise worker_reap_seconds",
            also=(("lmcache", "worker_reap_seconds"),),
        )
    yield from _server(recipe)


def lmcache_transfer_modes(recipe: Recipe) -> Iterator[Problem]:
    """Check the transfer modes. Server and engine must agree on who moves the bytes, or the engine hangs until the
    message timeout."""
    section = recipe.lmcache
    if section is None:
        return
    for name, _, connector in roles(recipe):
        leaf = next((leaf for leaf in leaf_connectors(connector) if isinstance(leaf, LmcacheMpSection)), None)
        if leaf is None or section.transfer_mode == "auto":
            continue
        asked, effective = transfer_mode_of(recipe, leaf)
        if effective != section.transfer_mode:
            meaning = f"{asked}, on {recipe.platform} {effective}" if asked != effective else asked
            yield Problem(
                (*(_lmcache_path(name, connector) or ()), "transfer_mode"),
                f"the engine asks for {meaning}, the server only accepts {section.transfer_mode}: "
                "the engine would hang until the message timeout",
                "set lmcache.transfer_mode: auto, which accepts both",
                also=(("lmcache", "transfer_mode"),),
            )
    if section.shm_name is not None and section.transfer_mode == "lmcache_driven":
        yield Problem(
            ("lmcache", "shm_name"),
            "has no effect with lmcache_driven, where the server reads the engine's memory",
            "remove it, or set transfer_mode to auto or engine_driven",
            also=(("lmcache", "transfer_mode"),),
        )


def lmcache_order(recipe: Recipe) -> Iterator[Problem]:
    """Refuse orders of a multi that fail."""
    for name, _, connector in roles(recipe):
        if not isinstance(connector, MultiSection) or recipe.lmcache is None:
            continue
        kinds = [leaf.kind for leaf in connector.of]
        leaf = next((leaf for leaf in connector.of if isinstance(leaf, LmcacheMpSection)), None)
        if leaf is None or "mooncake" not in kinds:
            continue
        path: Path = (name, "connector", "of")
        mooncake_first = kinds.index("mooncake") < kinds.index("lmcache-mp")
        moved = recipe.platform == "cpu" and transfer_mode_of(recipe, leaf)[1] == "lmcache_driven"
        if moved and mooncake_first:
            yield Problem(
                path,
                "on a CPU lmcache_driven moves the KV to shared memory, after Mooncake has registered its address: "
                "every transfer fails with `Bad address`",
                "put lmcache-mp first, or set lmcache.transfer_mode: auto",
                also=(("lmcache", "transfer_mode"),),
            )
        elif name == "decode" and not mooncake_first:
            yield Problem(
                path,
                "on decode the KV from prefill must win over LMCache's, and the first child wins",
                "put mooncake first" + (" and set lmcache.transfer_mode: auto" if moved else ""),
            )


def lmcache_prefix_caching(recipe: Recipe) -> Iterator[Problem]:
    """Refuse engine settings that LMCache cannot live with."""
    for name, role, connector in roles(recipe):
        path = _lmcache_path(name, connector)
        if path is None:
            continue
        if args_of(recipe, role).get("enable-prefix-caching") is False:
            yield Problem(
                flag_path(recipe, name, "enable-prefix-caching"),
                "LMCache finds KV by the block hashes that prefix caching makes",
                "remove the flag, or lmcache-mp from the connector",
                also=(path,),
            )
        env = env_of(recipe, role)
        for variable, why in (
            ("VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", "a reused request id makes LMCache serve another prompt's KV"),
            ("LMCACHE_USE_UPSTREAM_MP", "vLLM's own copy of the connector cannot talk to LMCache 0.5"),
        ):
            if str(env.get(variable, "0")) not in ("0", "", "false", "False"):
                yield Problem(env_path(recipe, name, variable), why, "remove it", also=(path,))


def lmcache_device_memory(recipe: Recipe) -> Iterator[Problem]:
    """Refuse memory that another process cannot map, although LMCache has to."""
    if recipe.platform == "cpu" or recipe.lmcache is None:
        return
    for name, role, connector in roles(recipe):
        leaf = next((leaf for leaf in leaf_connectors(connector) if isinstance(leaf, LmcacheMpSection)), None)
        if leaf is None or transfer_mode_of(recipe, leaf)[1] != "lmcache_driven":
            continue
        why = "its memory cannot be shared with the LMCache server by IPC"
        args, env = args_of(recipe, role), env_of(recipe, role)
        also = ((name, "connector"),)
        for flag in ("enable-cumem-allocator", "enable-sleep-mode"):
            if args.get(flag):
                yield Problem(flag_path(recipe, name, flag), why, "remove the flag", also=also)
        for variable in _ALLOCATOR_ENV:
            if "expandable_segments:true" in str(env.get(variable, "")).lower().replace(" ", ""):
                yield Problem(
                    env_path(recipe, name, variable),
                    f"expandable_segments: {why}",
                    "remove expandable_segments:True",
                    also=also,
                )


def lmcache_leases(recipe: Recipe) -> Iterator[Problem]:
    """Warn of a lease that a long queue outlives."""
    if recipe.lmcache is not None and recipe.lmcache.l1_read_ttl_seconds < 3600:
        yield Problem(
            ("lmcache", "l1_read_ttl_seconds"),
            f"KV that was found may be gone after {recipe.lmcache.l1_read_ttl_seconds} s in the queue",
            "use 3600 or more (7200 by default)",
        )


def _server(recipe: Recipe) -> Iterator[Problem]:
    section = recipe.lmcache
    assert section is not None
    for flag in section.extra_args:
        name = flag.lstrip("-").replace("_", "-")
        owned = SERVER_FLAGS.get(name.removeprefix("no-"))
        condition = owned.condition if owned is not None else None
        if owned is not None and (condition is None or condition.holds(recipe, "lmcache")):
            what = f"pdserve sets this flag of the server{f' {condition.text}' if condition else ''}"
            also = (condition.path("lmcache"),) if condition else ()
            yield Problem(("lmcache", "extra_args", flag), what, owned.instead, also=also)
        elif name != flag:
            yield Problem(
                ("lmcache", "extra_args", flag),
                "flags are written with hyphens, without dashes in front",
                f"write {name}",
            )
    for variable, value in section.env.items():
        if not isinstance(value, str | int):
            yield Problem(
                ("lmcache", "env", variable),
                "the server prints its environment to any client (/env), so it gets no secrets",
                "let the L2 adapter read a credentials file",
            )
        elif variable == "PYTHONHASHSEED":
            yield Problem(("lmcache", "env", variable), "pdserve sets it", "set engine.hash_seed")
    if section.shm_name is not None and ("/" in section.shm_name or not section.shm_name.strip()):
        yield Problem(("lmcache", "shm_name"), "a name in /dev/shm: not empty and without /")
    for i, adapter in enumerate(section.l2):
        if not isinstance(adapter.get("type"), str):
            path: Path = ("lmcache", "l2", i)
            yield Problem(path, "an L2 adapter needs a `type`", write=Line((*path, "type"), "fs", example=True))


def _lmcache_path(name: str, connector: AnyConnector | None) -> Path | None:
    """Return the path of the role's lmcache-mp, if it has one."""
    connectors: list[Any] = leaf_connectors(connector)
    for i, leaf in enumerate(connectors):
        if isinstance(leaf, LmcacheMpSection):
            return (name, "connector", "of", i) if isinstance(connector, MultiSection) else (name, "connector")
    return None


SECONDS_A_GIB = 1.0
STEP_SECONDS = 300
"""Of the timeout that is advised."""
_ON_DEMAND = "LMCACHE_ROCM_DEMAND_PINNED_ALLOCATOR"
_GIB = 1 << 30


def registration_timeouts(recipe: Recipe) -> Iterator[Problem]:
    """Warn of a timeout that is likely too short for the server's L1 and the KV that its engines register.

    The rule: one second for each GiB that is pinned or mapped while engines register. That is L1 (what is pinned at the
    start, where the rest is pinned on demand), and the KV of the workers where the recipe states its size
    (kv-cache-memory-bytes); weights are not registered and do not count. The source: the published launches on MI355X.
    On ROCm the server pins L1 in the background and acknowledges no registration while that holds up the opening of the
    engines' handles. `did not respond to register_kv_caches within 300 s` was seen with 1360 GB; the launch with 1200
    GB has 1200 s, and those with 2500 GB pin on demand. No rate was measured here. Such a stall is not reported from
    CUDA, and on a CPU nothing is pinned.
    """
    section = recipe.lmcache
    if section is None or recipe.platform != "rocm":
        return
    on_demand = str(section.env.get(_ON_DEMAND, "")).strip() == "1"
    pinned = section.l1_init_size_gb if on_demand else section.l1_size_gb
    needed = (pinned + _stated_kv_gib(recipe)) * SECONDS_A_GIB
    if section.mq_timeout_seconds >= needed:
        return
    advised = math.ceil(needed / STEP_SECONDS) * STEP_SECONDS
    yield Problem(
        ("lmcache", "mq_timeout_seconds"),
        f"engines may not be registered within {section.mq_timeout_seconds:g} s: the server pins and maps about "
        f"{needed / SECONDS_A_GIB:.0f} GiB meanwhile, and a second for each GiB is what published launches allow",
        f"write lmcache.mq_timeout_seconds: {advised}",
        also=(("lmcache", "l1_size_gb"),),
    )


def _stated_kv_gib(recipe: Recipe) -> float:
    """Return the KV of all workers of the largest role that attaches, in GiB; 0: the recipe leaves the size to vLLM."""
    sizes = [0.0]
    for _, role, connector in roles(recipe):
        with suppress(ValueError):  # a flag that vLLM refuses: the engine does not come that far
            stated = stated_kv_bytes(recipe, role) or 0
            if lmcache_leaves(connector):
                sizes.append(stated * role.parallel.workers / _GIB)
    return max(sizes)


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


def store_attachment(recipe: Recipe) -> Iterator[Problem]:
    """Check who uses the Mooncake store. The section and the roles' connectors have to agree."""
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


def store_master_flags(recipe: Recipe) -> Iterator[Problem]:
    """Refuse flags of the master that pdserve sets itself."""
    if recipe.mooncake_store is None:
        return
    for flag in recipe.mooncake_store.extra_args:
        path: Path = ("mooncake_store", "extra_args", flag)
        name = flag.replace("-", "_")
        if name in MASTER_FLAGS:
            yield Problem(path, "pdserve sets this flag", MASTER_FLAGS[name])
        elif name != flag:
            yield Problem(path, "flags of mooncake_master have underscores", f"write {name.strip('_')}")


def single_cache(recipe: Recipe) -> Iterator[Problem]:
    """Refuse two children that keep the same KV: every prompt is stored twice, and only the first one that has it
    loads."""
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


def store_prefix_caching(recipe: Recipe) -> Iterator[Problem]:
    """Refuse a cache of KV without the engines' prefix caching. LMCache has a rule of its own for that."""
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
    """Return the path of a role's mooncake-store, if it has one."""
    if isinstance(connector, MooncakeStoreSection):
        return (name, "connector")
    if isinstance(connector, MultiSection):
        for index, leaf in enumerate(connector.of):
            if isinstance(leaf, MooncakeStoreSection):
                return (name, "connector", "of", index)
    return None
