"""What flags and platform decide of the KV cache of one role, as vLLM 0.32 would have it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pdserve.errors import RecipeError
from pdserve.models.kinds import hints_of
from pdserve.models.kv_cache import KvFlags
from pdserve.models.layers import text_config
from pdserve.models.quantization import kv_dtype_of
from pdserve.models.unknown import UnknownModelError
from pdserve.recipe import effective
from pdserve.recipe.load.problems import dotted
from pdserve.recipe.model import Recipe, Role
from pdserve.recipe.rules.engines import flag_path
from pdserve.recipe.vllm_int import stated_int
from pdserve.roles import EngineRole

_BATCHES = ((160, 16384), (70, 8192), (0, 2048))
"""vLLM's max-num-batched-tokens of a server on devices from so many GiB on (A100: the last)."""
_CPU_KERNEL, _DEVICE_KERNEL, _CPU_MLA = 32, 16, 16
_SIXTEEN_BITS = {"half": "float16", "float": "float32"}


def kv_flags(
    recipe: Recipe, name: EngineRole, role: Role, config: Mapping[str, Any], device_gib: float | None = None
) -> tuple[KvFlags, list[str]]:
    """What decides the KV cache, and what had to be assumed for it. `device_gib`: vLLM's batch depends on it.

    Raises RecipeError for a flag whose value cannot be counted with, UnknownModelError for a model.
    """
    args, text, assumed = effective.args_of(recipe, role), text_config(config), list[str]()

    def stated(flag: str) -> int | None:
        try:
            return stated_int(args, flag)
        except ValueError:
            raise RecipeError(
                f"the plan cannot count with {flag}: {args[flag]}",
                where=dotted(flag_path(recipe, name, flag)),
                cause="it has to be a whole number there",
                todo=f"write {flag} as a number of tokens, for example 32768",
            ) from None

    flag = "decode-context-parallel-size"
    if (stated(flag) or 1) > 1:
        raise RecipeError(
            f"the plan does not know how KV is cut with {flag}",
            where=dotted(flag_path(recipe, name, flag)),
            todo=f"plan without it: --set {dotted(flag_path(recipe, name, flag))}=1",
        )
    on_cpu = recipe.platform == "cpu"
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
    cpu_mla = on_cpu and bool(text.get("kv_lora_rank"))
    block = _CPU_MLA if cpu_mla else stated("block-size") or effective.block_size_of(recipe, role)
    if cpu_mla:
        assumed.append(f"blocks of {_CPU_MLA} tokens, as vLLM has them for MLA on a CPU without AMX")
    elif "block-size" not in args and not on_cpu:
        assumed.append(f"block-size {block}: the attention backend may choose another")
    batch = stated("max-num-batched-tokens")
    if batch is None:
        batch = next(tokens for gib, tokens in _BATCHES if (device_gib or 0) >= gib)
        batch *= role.parallel.tp * role.parallel.pp if on_cpu else 1
    overlapping = 0 if on_cpu or args.get("async-scheduling") is False else 1
    cache_dtype = str(args.get("kv-cache-dtype") or "auto")
    if cache_dtype == "auto":
        cache_dtype = kv_dtype_of(config, latent=bool(text.get("kv_lora_rank"))) or "auto"
    if cache_dtype != "auto" and args.get("kv-cache-dtype-skip-layers"):
        raise UnknownModelError("some layers keep KV of another size (kv-cache-dtype-skip-layers)")
    state_dtype = args.get("mamba-ssm-cache-dtype")
    if on_cpu and state_dtype in (None, "auto"):
        state_dtype = "float32"
        if hints_of(config).recurrent:
            assumed.append("recurrent state of float32, as vLLM sets it on a CPU with AVX-512 BF16")
    dtype = str(args.get("dtype") or "auto")
    if dtype == "auto":
        dtype = str(text.get("dtype") or text.get("torch_dtype") or config.get("torch_dtype") or "bfloat16")
        dtype = "bfloat16" if dtype == "float32" else dtype
    return (
        KvFlags(
            model_len=length,
            block_size=block,
            kernel_block=_CPU_MLA if cpu_mla else _CPU_KERNEL if on_cpu else _DEVICE_KERNEL,
            dtype=_SIXTEEN_BITS.get(dtype, dtype),
            cache_dtype=cache_dtype,
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


def _speculative(args: Mapping[str, Any]) -> Mapping[str, Any]:
    value = args.get("speculative-config")
    return value if isinstance(value, Mapping) else {}


def drafts_for_itself(args: Mapping[str, Any]) -> bool:
    """Whether the model's own MTP modules draft."""
    return str(_speculative(args).get("method", "")).endswith("mtp")


def _draft_tokens(args: Mapping[str, Any], assumed: list[str]) -> int:
    speculative = _speculative(args)
    if speculative and not drafts_for_itself(args):
        assumed.append("nothing for the draft model: its weights and KV come on top")
    number = speculative.get("num_speculative_tokens")
    return number if isinstance(number, int) and not isinstance(number, bool) else 0
