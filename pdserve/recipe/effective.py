"""Apply defaults and shared settings to a role: connector, flags, environment, models, memory."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from pdserve.pd.config import routing
from pdserve.recipe.connectors.caches import LmcacheMpSection
from pdserve.recipe.connectors.mooncake import MooncakeSection
from pdserve.recipe.connectors.moriio import MoriioSection
from pdserve.recipe.connectors.registry import AnyConnector, AnyLeaf, MultiSection, RawSection
from pdserve.recipe.model import Recipe, RestartPolicy, Role
from pdserve.recipe.vllm_int import vllm_int
from pdserve.roles import EngineRole

LOAD_CAP_SWITCH = "CHUNKED_LMCACHE_MAX_TOKENS_PER_LOAD"
"""The environment switch of the patch that capped loads first; 0 is off."""
CPU_BLOCK_SIZE = 128
"""vLLM's CPU backend (0.32.0)."""
DEVICE_BLOCK_SIZE = 16
"""vLLM's default on GPUs, unless an attention backend asks for another one."""

_SPECULATIVE = frozenset({"speculative-config", "spec-method", "spec-model"})
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def connector_of(recipe: Recipe, name: EngineRole, role: Role) -> AnyConnector | None:
    """Return the role's connector, or the default that `Role.connector` describes."""
    if role.connector is not None:
        return role.connector
    attached = recipe.lmcache is not None and name in recipe.lmcache.on
    if name == "aggregated":
        return LmcacheMpSection() if attached else None
    return MultiSection(of=[MooncakeSection(), LmcacheMpSection()]) if attached else MooncakeSection()


def restart_of(name: EngineRole, role: Role, connector: AnyConnector | None) -> RestartPolicy:
    """Return what happens when an instance of a role dies. By default a prefill with MoRI-IO stays dead: decode never
    reaches the one that takes its place."""
    chosen = "policy" in role.restart.model_fields_set
    if not chosen and name == "prefill" and any(isinstance(leaf, MoriioSection) for leaf in leaf_connectors(connector)):
        return role.restart.model_copy(update={"policy": "never"})
    return role.restart


def drafts(args: Mapping[str, Any]) -> bool:
    """Return whether the flags of an engine ask for drafts (speculative decoding)."""
    return any(value and flag.partition(".")[0] in _SPECULATIVE for flag, value in args.items())


def leaf_connectors(connector: AnyConnector | None) -> list[AnyLeaf | RawSection]:
    """Return the connector itself, or the children of a multi, in order of priority."""
    if connector is None:
        return []
    return list(connector.of) if isinstance(connector, MultiSection) else [connector]


def transfers_of(connector: AnyConnector | None) -> list[AnyLeaf]:
    """Return the parts that move KV between prefill and decode; a raw connector has none."""
    return [leaf for leaf in sections(connector) if leaf.ABOUT.protocol is not None]


def sections(connector: AnyConnector | None) -> list[AnyLeaf]:
    """Return the connector's parts without a raw one, of which nothing is known."""
    return [leaf for leaf in leaf_connectors(connector) if not isinstance(leaf, RawSection)]


def caches(connector: AnyConnector | None) -> bool:
    """Return whether a part of the connector keeps KV by the block hashes of prefix caching. Of a raw connector that is
    its author's."""
    return any(leaf.ABOUT.caches for leaf in sections(connector))


def first_transfer_of(connector: AnyConnector | None) -> AnyLeaf | None:
    """Return the first part of a connector that moves KV between prefill and decode; None: there is none."""
    return next(iter(transfers_of(connector)), None)


def args_of(recipe: Recipe, role: Role) -> dict[str, Any]:
    """Return the flags of a role: the shared ones, then its own; null drops a flag."""
    merged = {**recipe.engine.args, **role.args}
    return {flag: value for flag, value in merged.items() if value is not None}


def env_of(recipe: Recipe, role: Role) -> dict[str, Any]:
    """Return the environment of a role: the container's, the shared one, then its own. Secrets are references."""
    outer = recipe.container.env if recipe.container is not None else {}
    return {**outer, **recipe.engine.env, **role.env}


def block_size_of(recipe: Recipe, role: Role) -> int:
    """Return the tokens of a KV block: the recipe's flag, else vLLM's default on the platform."""
    value = args_of(recipe, role).get("block-size")
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    return CPU_BLOCK_SIZE if recipe.platform == "cpu" else DEVICE_BLOCK_SIZE


def lmcache_leaves(connector: AnyConnector | None) -> list[LmcacheMpSection]:
    """Return the parts that load from LMCache."""
    return [leaf for leaf in leaf_connectors(connector) if isinstance(leaf, LmcacheMpSection)]


def load_cap_of(recipe: Recipe, role: Role, leaf: LmcacheMpSection) -> int | None:
    """Return the tokens of a reload at most, as the engine will have it: the environment's switch overrides, 0 is no
    cap."""
    switch = str(env_of(recipe, role).get(LOAD_CAP_SWITCH, "")).strip()
    cap = int(switch) if switch.isascii() and switch.isdecimal() else leaf.max_tokens_per_load
    return cap or None


def transfer_mode_of(recipe: Recipe, connector: LmcacheMpSection) -> tuple[str, str]:
    """Return the mode that the engine asks for, as configured and as it comes out."""
    return connector.modes(recipe.lmcache, recipe.platform)


def policy_of(recipe: Recipe, name: EngineRole) -> str:
    """Return the routing policy of a role's pool."""
    return routing.policy_of(recipe.proxy.routing, name).kind


def publishes_kv_events(recipe: Recipe, name: EngineRole) -> bool:
    """Return whether the engines of a role publish what their KV caches hold."""
    return policy_of(recipe, name) == "kv_events"


def is_on_hub(recipe: Recipe) -> bool:
    """Return whether the model comes from the hub: a folder does not, nor s3://..., nor ModelScope's."""
    return bool(_HUB_ID.fullmatch(recipe.model.id or "")) and not _from_modelscope(recipe)


def fetches(recipe: Recipe) -> bool:
    """Return whether models of the hub are fetched before the engines start."""
    return recipe.model.download and not _from_modelscope(recipe)


def downloads(recipe: Recipe) -> bool:
    """Return whether the recipe's own model is fetched before the engines start."""
    return recipe.model.download and is_on_hub(recipe)


def _from_modelscope(recipe: Recipe) -> bool:
    return str(recipe.engine.env.get("VLLM_USE_MODELSCOPE", "")).lower() in ("1", "true")


def roles(recipe: Recipe) -> Iterator[tuple[EngineRole, Role, AnyConnector | None]]:
    """Yield the roles of the mode with their connectors, in start order."""
    for name, role in recipe.roles():
        yield name, role, connector_of(recipe, name, role)


SPECULATIVE = "speculative-config"
SHORT = "spec-model"
"""vLLM's flags that name the model of drafts; the short one takes no revision."""
_DRAFT_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
"""With an owner: `ngram` and `suffix` are methods without a model."""


class HubModel(NamedTuple):
    """A model of the hub at one revision; None: the main branch."""

    id: str
    revision: str | None


def hub_models(recipe: Recipe, role: Role) -> tuple[HubModel, ...]:
    """Return the models that are fetched for the engines of a role before they start, the recipe's first."""
    own = [HubModel(recipe.model.id or "", recipe.model.revision)] if downloads(recipe) else []
    return tuple(dict.fromkeys([*own, *draft_models(recipe, role)]))


def draft_models(recipe: Recipe, role: Role) -> Iterator[HubModel]:
    """Yield the model of drafts, where it is fetched."""
    if not fetches(recipe):
        return
    args = args_of(recipe, role)
    section = args.get(SPECULATIVE)
    config = dict(section) if isinstance(section, Mapping) else {}
    config |= {flag.partition(".")[2]: value for flag, value in args.items() if flag.startswith(f"{SPECULATIVE}.")}
    config.setdefault("model", args.get(SHORT))
    name, revision = config["model"], config.get("revision")
    if isinstance(name, str) and _DRAFT_ID.fullmatch(name):
        yield HubModel(name, revision if isinstance(revision, str) else None)


KV_MEMORY_FLAG = "kv-cache-memory-bytes"
_GIB = 1 << 30


def stated_kv_bytes(recipe: Recipe, role: Role) -> int | None:
    """Return the KV memory of one worker in bytes; None: the recipe leaves it to vLLM. Raises ValueError for a flag
    that vLLM does not take."""
    on_cpu = recipe.platform == "cpu"
    space = str(env_of(recipe, role).get("VLLM_CPU_KVCACHE_SPACE", "")).strip()
    if on_cpu and space.isdecimal():
        return int(space) * _GIB  # platforms/cpu.py sets it over the flag
    value = args_of(recipe, role).get(KV_MEMORY_FLAG)
    stated = None if value is None else vllm_int(value)
    if stated is not None and stated < 0:
        raise ValueError(f"less than nothing: {value!r}")
    return stated if stated or on_cpu else None  # on a device 0 is as if it were not there (gpu_worker.py)
