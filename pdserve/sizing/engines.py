"""One role: weights and KV of a rank, blocks and requests of an instance."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pdserve.errors import RecipeError
from pdserve.models.kv_cache import KvCache, KvFlags, kv_cache
from pdserve.models.layers import layers_of, text_config
from pdserve.models.weights import Sharding, Tensor, rank_weights
from pdserve.plan.frozen import Frozen
from pdserve.recipe import effective
from pdserve.recipe.load.problems import dotted
from pdserve.recipe.model import Recipe, Role
from pdserve.recipe.rules.engines import flag_path
from pdserve.roles import EngineRole
from pdserve.sizing.given import GIB, Given, Span

UTILIZATION = 0.92
"""vLLM's default of gpu-memory-utilization from 0.22 on."""
BESIDE_KV_GIB = Span(low=0.4, high=8.2)
"""Activations, graphs and what is no tensor, of one rank: the smallest and the largest of the runs in docs/plan.md."""
_BATCHES = ((160, 16384), (70, 8192), (0, 2048))
"""vLLM's max-num-batched-tokens of a server on devices from so many GiB on (A100: the last one)."""
_CPU_KERNEL, _DEVICE_KERNEL, _CPU_MLA = 32, 16, 16
_SIXTEEN_BITS = {"half": "float16", "float": "float32"}


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
    """Raises UnknownModelError for a model, RecipeError for a flag whose value cannot be counted with."""
    args, text = effective.args_of(recipe, role), text_config(config)
    flags, assumed = kv_flags(recipe, name, role, config, given)
    drafts = _drafts(args)
    cache = kv_cache(layers_of(config, drafts=drafts), flags)
    parallel = role.parallel
    weights = None
    if tensors:
        sharding = Sharding(
            layers=text["num_hidden_layers"],
            kv_heads=text.get("num_key_value_heads") or text.get("num_attention_heads") or 1,
            tp=parallel.tp,
            pp=parallel.pp,
            dp=parallel.dp,
            ep=parallel.ep,
            tied=bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", False))),
            drafts=drafts,
        )
        held = rank_weights(tensors, sharding)
        weights = Span(low=held.low, high=held.high)
    memory = _kv_memory(recipe, role, args, weights, given, assumed)
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
            token_bytes=cache.token_bytes,
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


def kv_flags(
    recipe: Recipe, name: EngineRole, role: Role, config: Mapping[str, Any], given: Given
) -> tuple[KvFlags, list[str]]:
    """What decides the KV cache, and what had to be assumed for it."""
    args, text, assumed = effective.args_of(recipe, role), text_config(config), list[str]()

    def stated(flag: str) -> int | None:
        value = args.get(flag)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise RecipeError(
                f"the plan cannot count with {flag}: {value}",
                where=dotted(flag_path(recipe, name, flag)),
                cause="it has to be a whole number there",
                todo=f"write {flag} as a number of tokens, for example 32768",
            )
        return value

    for flag in ("decode-context-parallel-size", "prefill-context-parallel-size"):
        if (stated(flag) or 1) > 1:
            raise RecipeError(
                f"the plan does not know how KV is cut with {flag}",
                where=dotted(flag_path(recipe, name, flag)),
                todo=f"plan without it: --set {dotted(flag_path(recipe, name, flag))}=1",
            )
    on_cpu, latent = recipe.platform == "cpu", bool(text.get("kv_lora_rank"))
    length = stated("max-model-len")
    if length is None:
        length = text.get("max_position_embeddings") or config.get("max_position_embeddings") or 0
        if length <= 0:
            raise RecipeError(
                "max-model-len is not stated, and the model's config.json has no max_position_embeddings",
                where=f"{name}.args",
                todo=f"write {name}.args.max-model-len: 32768, or what the engines shall serve",
            )
        assumed.append(f"max-model-len {length}: max_position_embeddings of the model")
    block = stated("block-size") or (_CPU_MLA if on_cpu and latent else effective.block_size_of(recipe, role))
    if "block-size" not in args and (latent or not on_cpu):
        assumed.append(f"block-size {block}: the attention backend may choose another one")
    batch = stated("max-num-batched-tokens")
    if batch is None:
        batch = next(tokens for gib, tokens in _BATCHES if (given.device_gib or 0) >= gib)
        batch *= role.parallel.tp * role.parallel.pp if on_cpu else 1
    overlapping = 0 if on_cpu or args.get("async-scheduling") is False else 1
    cache_dtype = args.get("kv-cache-dtype") or _checkpoint_kv(config) or "auto"
    state_dtype = args.get("mamba-ssm-cache-dtype")
    if on_cpu and state_dtype in (None, "auto"):
        state_dtype = "float32"  # as vLLM resets it on CPUs with AVX-512 BF16
    dtype = str(args.get("dtype") or "auto")
    if dtype == "auto":
        dtype = str(text.get("dtype") or text.get("torch_dtype") or config.get("torch_dtype") or "bfloat16")
        dtype = "bfloat16" if dtype == "float32" else dtype
    return (
        KvFlags(
            model_len=length,
            block_size=block,
            kernel_block=_CPU_MLA if on_cpu and latent else _CPU_KERNEL if on_cpu else _DEVICE_KERNEL,
            dtype=_SIXTEEN_BITS.get(dtype, dtype),
            cache_dtype=str(cache_dtype),
            state_dtype=None if state_dtype in (None, "auto") else str(state_dtype),
            tp=role.parallel.tp,
            pp=role.parallel.pp,
            prefix_caching=args.get("enable-prefix-caching") is not False,
            hybrid_manager=not args.get("disable-hybrid-kv-cache-manager"),
            in_flight=batch * (role.parallel.pp + overlapping),
            draft_tokens=_draft_tokens(args, assumed),
        ),
        assumed,
    )


def _checkpoint_kv(config: Mapping[str, Any]) -> str | None:
    """The type of KV that a checkpoint of ModelOpt asks for."""
    quantization = config.get("quantization_config")
    if not isinstance(quantization, Mapping) or not str(quantization.get("quant_method", "")).startswith("modelopt"):
        return None
    inner = quantization.get("quantization", quantization)
    algorithm = inner.get("kv_cache_quant_algo") if isinstance(inner, Mapping) else None
    return algorithm.lower() if isinstance(algorithm, str) and algorithm.lower() in ("fp8", "nvfp4") else None


def _speculative(args: Mapping[str, Any]) -> Mapping[str, Any]:
    value = args.get("speculative-config")
    return value if isinstance(value, Mapping) else {}


def _drafts(args: Mapping[str, Any]) -> bool:
    return str(_speculative(args).get("method", "")).endswith("mtp")


def _draft_tokens(args: Mapping[str, Any], assumed: list[str]) -> int:
    speculative = _speculative(args)
    if speculative and not _drafts(args):
        assumed.append("nothing for the draft model: its weights and KV come on top")
    number = speculative.get("num_speculative_tokens")
    return number if isinstance(number, int) and not isinstance(number, bool) else 0


def _kv_memory(
    recipe: Recipe,
    role: Role,
    args: Mapping[str, Any],
    weights: Span | None,
    given: Given,
    assumed: list[str],
) -> Span | None:
    """Bytes that one rank has for KV."""
    stated = args.get("kv-cache-memory-bytes")
    if isinstance(stated, int) and not isinstance(stated, bool):
        return Span(low=stated, high=stated)
    if recipe.platform == "cpu":
        space = str(effective.env_of(recipe, role).get("VLLM_CPU_KVCACHE_SPACE", ""))
        return Span(low=int(space) * GIB, high=int(space) * GIB) if space.isdigit() else None
    if given.kv_gib is not None:
        return Span(low=given.kv_gib * GIB, high=given.kv_gib * GIB)
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
