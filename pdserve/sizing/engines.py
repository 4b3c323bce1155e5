"""One role: weights and KV of a rank, blocks and requests of an instance."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pdserve.errors import RecipeError
from pdserve.models.kv_cache import KvCache, element_bytes, kv_cache
from pdserve.models.layers import layers_of, text_config
from pdserve.models.weights import Sharding, Tensor, rank_weights
from pdserve.plan.engines.kv_flags import drafts_for_itself, kv_flags
from pdserve.plan.frozen import Frozen
from pdserve.recipe import effective
from pdserve.recipe.effective import KV_MEMORY_FLAG, stated_kv_bytes
from pdserve.recipe.load.problems import dotted
from pdserve.recipe.model import Recipe, Role
from pdserve.recipe.rules.engines import flag_path
from pdserve.roles import EngineRole
from pdserve.sizing.given import GIB, Given, Span
from pdserve.sizing.online import assumption, at_least, quantized_bits

UTILIZATION = 0.92
"""vLLM's default of gpu-memory-utilization from 0.22 on."""
BESIDE_KV_GIB = Span(low=0.4, high=8.2)
"""Activations, graphs and what is no tensor, of one rank: the smallest and the largest of the runs in docs/plan.md."""


class GroupSize(Frozen):
    """A KV cache group."""

    keeps: str
    layers: int
    block: int
    page_bytes: int
    """Of one layer and block on one rank."""
    padding: float
    """Share of a page that holds nothing."""


class RoleSize(Frozen):
    """One role of the recipe. Bytes are those of one rank, which is one device."""

    role: EngineRole
    instances: int
    tp: int
    pp: int
    dp: int
    model_len: int
    weights_bytes: Span | None
    """None: the weights are not at hand."""
    kv_bytes: Span | None
    """Memory for KV; None: neither stated nor to be derived."""
    block_size: int
    """Of attention, as vLLM will have it."""
    block_bytes: int
    token_bytes: float
    """On the rank that holds most layers."""
    groups: tuple[GroupSize, ...]
    blocks: Span | None
    """Of one rank; each DP rank of an instance has as many."""
    requests: Span | None
    """Of max-model-len at once in one instance, over its DP ranks."""
    tokens: Span | None
    """The same in tokens."""
    assumed: tuple[str, ...]


@dataclass(frozen=True)
class Sized:
    """A role, and the cache behind its numbers."""

    size: RoleSize
    cache: KvCache


def size_role(
    recipe: Recipe,
    name: EngineRole,
    role: Role,
    config: Mapping[str, Any],
    tensors: tuple[Tensor, ...] | None,
    given: Given,
) -> Sized:
    """Raises UnknownModelError for a model, RecipeError for what the recipe has that cannot be counted with."""
    if role.parallel.pcp > 1:
        raise RecipeError(
            "the plan does not know how KV and weights are cut with prefill context parallelism",
            where=f"{name}.parallel.pcp",
            todo=f"plan without it: --set {name}.parallel.pcp=1",
        )
    args, text = effective.args_of(recipe, role), text_config(config)
    flags, assumed = kv_flags(recipe, name, role, config, given.device_gib)
    drafts = drafts_for_itself(args)
    layers = layers_of(config, drafts=drafts)
    cache = kv_cache(layers, flags)
    parallel = role.parallel
    weights = None
    if tensors:
        sharding = Sharding(
            layers=text["num_hidden_layers"],
            kv_heads=max((layer.kv_heads for layer in layers), default=0),
            tp=parallel.tp,
            pp=parallel.pp,
            dp=parallel.dp,
            tied=bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", False))),
            drafts=drafts,
            model_bytes=int(element_bytes(flags.dtype)),
        )
        weights = _weights(tensors, sharding, args, config, assumed)
    memory = _kv_memory(recipe, name, role, args, weights, given, assumed)
    blocks = _blocks(cache, args, memory)
    requests = tokens = None
    if blocks is not None:
        low, high = (cache.concurrency(int(end)) * parallel.dp for end in (blocks.low, blocks.high))
        requests = Span(low=low, high=high)
        tokens = Span(low=int(low * flags.model_len), high=int(high * flags.model_len))
    return Sized(
        size=RoleSize(
            role=name,
            instances=role.instances,
            tp=parallel.tp,
            pp=parallel.pp,
            dp=parallel.dp,
            model_len=flags.model_len,
            weights_bytes=weights,
            kv_bytes=memory,
            block_size=cache.flags.block_size,
            block_bytes=cache.block_bytes,
            token_bytes=cache.rank_token_bytes,
            groups=tuple(
                GroupSize(
                    keeps=group.keeps,
                    layers=len(group.layers),
                    block=group.block,
                    page_bytes=group.page_bytes,
                    padding=1 - group.used_bytes / group.page_bytes,
                )
                for group in cache.groups
            ),
            blocks=blocks,
            requests=requests,
            tokens=tokens,
            assumed=tuple(assumed),
        ),
        cache=cache,
    )


def _weights(
    tensors: tuple[Tensor, ...],
    sharding: Sharding,
    args: Mapping[str, Any],
    config: Mapping[str, Any],
    assumed: list[str],
) -> Span:
    """Bytes of one rank."""
    held = rank_weights(tensors, sharding)
    if (bits := quantized_bits(args, config)) is None:
        return Span(low=held.low, high=held.high)
    assumed.append(assumption(args, bits))
    return Span(low=rank_weights(at_least(tensors, bits), sharding).low, high=held.high)


def _kv_memory(
    recipe: Recipe,
    name: EngineRole,
    role: Role,
    args: Mapping[str, Any],
    weights: Span | None,
    given: Given,
    assumed: list[str],
) -> Span | None:
    """Bytes that one rank has for KV."""
    try:
        stated = stated_kv_bytes(recipe, role)
    except ValueError:
        where = dotted(flag_path(recipe, name, KV_MEMORY_FLAG))
        raise RecipeError(
            f"vLLM takes no {KV_MEMORY_FLAG}: {args[KV_MEMORY_FLAG]}",
            where=where,
            cause="it has to be a whole number of bytes, or one with a suffix: 8G is 8 GiB, 8.5g are 8.5 * 10^9 bytes",
            todo=f"write {where}: 8G, or the bytes that KV shall have",
        ) from None
    if stated is not None:
        return Span(low=stated, high=stated)
    if given.kv_gib is not None:
        return Span(low=given.kv_gib * GIB, high=given.kv_gib * GIB)
    if recipe.platform == "cpu":
        return None
    if given.device_gib is None or weights is None:
        return None
    share = args.get("gpu-memory-utilization", UTILIZATION)
    usable = given.device_gib * float(share) * GIB
    assumed.append(
        f"{BESIDE_KV_GIB.low:g} to {BESIDE_KV_GIB.high:g} GiB a device for activations, graphs and buffers "
        "(public logs, docs/plan.md)"
    )
    low = usable - weights.high - BESIDE_KV_GIB.high * GIB
    high = usable - weights.low - BESIDE_KV_GIB.low * GIB
    return Span(low=max(low, 0), high=max(high, 0))


def _blocks(cache: KvCache, args: Mapping[str, Any], memory: Span | None) -> Span | None:
    override = args.get("num-gpu-blocks-override")
    if isinstance(override, int) and not isinstance(override, bool):
        return Span(low=override, high=override)
    if memory is None:
        return None
    return Span(low=cache.blocks(int(memory.low)), high=cache.blocks(int(memory.high)))
