"""Rules between a recipe and the config.json of its model: experts, the KV cache that flags make, several KV groups.

A pair of versions that would corrupt KV of several groups, or quietly do without it, is refused before anything starts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pdserve import known
from pdserve.errors import PdserveError, PreflightError, RecipeError
from pdserve.installed.versions import Versions
from pdserve.known import Defect, is_affected
from pdserve.models.config_json import UnknownModelError, kv_dtype_of, texts
from pdserve.models.kv_cache import (
    KvFlags,
    TableGroup,
    can_store,
    good_chunk,
    kv_cache,
    lmcache_refusal,
    offloading_refusal,
    table_groups,
)
from pdserve.models.layers import KvHints, hints_of, layers_of, text_config
from pdserve.recipe import effective
from pdserve.recipe.connectors.registry import AnyConnector, RawSection, attaches_lmcache, class_names
from pdserve.recipe.effective import SPECULATIVE
from pdserve.recipe.load.problems import dotted
from pdserve.recipe.model import Recipe, Role
from pdserve.recipe.rules.engines import flag_path
from pdserve.recipe.vllm_int import known_int, stated_int
from pdserve.roles import EngineRole

_EXPERT_COUNTS = ("num_experts", "moe_num_experts", "n_routed_experts", "num_local_experts", "block_configs")
"""The keys that vLLM 0.32 reads (transformers_utils/model_arch_config_convertor.py)."""


def has_experts(config: Mapping[str, Any]) -> bool:
    """Return whether the model is a mixture of experts."""
    return any(text.get(key) for text in texts(config) for key in _EXPERT_COUNTS)


def check_experts(recipe: Recipe, config: Mapping[str, Any] | None) -> None:
    """Refuse external load balancing for a model without experts. Raises RecipeError. `config`: the model's
    config.json; None where it is not at hand, and nothing is refused."""
    if config is None or has_experts(config):
        return
    for name, role in recipe.roles():
        if role.parallel.load_balancing == "external":
            raise RecipeError(
                "this model has no experts, and without them vLLM refuses external load balancing",
                where=f"{name}.parallel.load_balancing",
                cause=f"config.json has none of {', '.join(_EXPERT_COUNTS)}: its ranks would not depend on each other",
                todo=f"write `instances: {role.instances * role.parallel.dp}` with dp 1: that is the same",
            )


_BATCHES = ((160, 16384), (70, 8192), (0, 2048))
"""vLLM's max-num-batched-tokens of a server on devices from so many GiB on (A100: the last)."""
_CPU_KERNEL, _DEVICE_KERNEL, _CPU_MLA = 32, 16, 16
_SIXTEEN_BITS = {"half": "float16", "float": "float32"}


def kv_flags(
    recipe: Recipe, name: EngineRole, role: Role, config: Mapping[str, Any], device_gib: float | None = None
) -> tuple[KvFlags, list[str]]:
    """Return what decides the KV cache, and what had to be assumed for it. `device_gib`: vLLM's batch depends on it.

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
    """Return whether the model's own MTP modules draft."""
    return str(_speculative(args).get("method", "")).endswith("mtp")


def _draft_tokens(args: Mapping[str, Any], assumed: list[str]) -> int:
    speculative = _speculative(args)
    if speculative and not drafts_for_itself(args):
        assumed.append("nothing for the draft model: its weights and KV come on top")
    number = speculative.get("num_speculative_tokens")
    return number if isinstance(number, int) and not isinstance(number, bool) else 0


MANAGER_OFF = "disable-hybrid-kv-cache-manager"
"""vLLM's flag: windows are then kept as full attention, in one group; recurrent state cannot be."""


_DELTA_NET = ("linear_num_value_heads", "linear_attn_config")
"""Keys of a config.json whose recurrent layers are gated delta nets."""


@dataclass(frozen=True)
class _Case:
    """One role whose connectors store or move KV, and what is known around it."""

    recipe: Recipe
    name: EngineRole
    role: Role
    connector: AnyConnector
    hints: KvHints
    config: Mapping[str, Any] | None
    versions: Versions

    @property
    def args(self) -> Mapping[str, Any]:
        return effective.args_of(self.recipe, self.role)

    @property
    def classes(self) -> frozenset[str]:
        return class_names(self.connector)

    @property
    def lmcache(self) -> bool:
        return attaches_lmcache(self.connector)

    @property
    def single_group(self) -> bool:
        return bool(self.args.get(MANAGER_OFF))

    def flag(self, flag: str) -> str:
        return dotted(flag_path(self.recipe, self.name, flag))

    def why(self) -> str:
        kinds = " and ".join(sorted(self.hints.kinds))
        return f"config.json states by {self.hints.key} that layers keep KV of these kinds: {kinds}"

    def has(self, defect: Defect) -> bool:
        """Return whether the versions are known to have a defect: an unknown or unreadable one has none."""
        return all(is_affected(package, text, self.versions) for package, text in defect.versions.items())

    def number(self, flag: str) -> int | None:
        """Return the value of a flag that is a number above 0."""
        return known_int(self.args, flag)


def check_kv_groups(recipe: Recipe, config: Mapping[str, Any] | None, versions: Versions) -> Iterator[str]:
    """Check the connectors against the model's KV groups, and yield warnings. Raises RecipeError or PreflightError for
    the first thing that cannot work.

    `config`: the model's config.json, None where it is not at hand: nothing is refused on suspicion then.
    """
    hints = KvHints(frozenset({"unknown"}), "") if config is None else hints_of(config)
    for name, role, connector in effective.roles(recipe):
        if connector is None:
            continue
        case = _Case(recipe, name, role, connector, hints, config, versions)
        for rule in _RULES:
            if (error := rule(case)) is not None:
                raise error
        yield from _warnings(case)
    if recipe.lmcache is not None and "unknown" in hints.kinds and (config is not None or recipe.model.id is not None):
        yield (
            "whether this model's KV has several groups (windows, recurrent state) is not known: "
            + (f"{hints.key} names layers of unknown kinds" if hints.key else "its config.json is not here")
            + "; if it has, LMCache needs vllm >= 0.23, lmcache >= 0.4.7 and transfer mode lmcache_driven"
        )


def _state_on_old_vllm(case: _Case) -> PdserveError | None:
    defect = known.STATE_NOT_LOADED
    if not case.hints.recurrent or not case.has(defect):
        return None
    return PreflightError(
        f"vllm {case.versions.vllm} {defect.what} ({defect.source})",
        where=f"{case.name}.connector",
        cause=case.why(),
        todo=defect.todo,
    )


def _drafts_in_state(case: _Case) -> PdserveError | None:
    """Refuse drafts beside recurrent state: of a prompt from prefill, decode computes the last token itself. Rows of
    gated delta nets are told apart in another way, which vllm#47466 corrected in 0.26."""
    defect = known.DRAFTS_IN_STATE
    delta_net = any(text.get(key) for text in texts(case.config or {}) for key in _DELTA_NET)
    if case.name != "decode" or not case.hints.recurrent or delta_net or not effective.drafts(case.args):
        return None
    if not case.has(defect):
        return None
    return PreflightError(
        f"vllm {case.versions.vllm} {defect.what} ({defect.source})",
        where=case.flag(SPECULATIVE),
        cause=case.why(),
        todo=defect.todo,
    )


def _state_needs_the_manager(case: _Case) -> PdserveError | None:
    if not case.hints.recurrent or not case.single_group:
        return None
    return RecipeError(
        "recurrent state has a group of its own, which the hybrid KV cache manager keeps",
        where=case.flag(MANAGER_OFF),
        cause=case.why(),
        todo="remove the flag",
    )


def _manager_is_turned_off(case: _Case) -> PdserveError | None:
    """Refuse several KV groups without the hybrid KV cache manager. vLLM 0.21 turns the manager off for every
    connector, later ones for a connector that cannot handle groups."""
    if not case.hints.several or case.single_group:
        return None
    if case.has(known.ONE_GROUP_IN_VLLM):
        guilty = f"vllm {case.versions.vllm} turns its hybrid KV cache manager off for every connector"
    elif case.lmcache and case.has(known.ONE_GROUP_IN_LMCACHE):
        guilty = f"the connector of lmcache {case.versions.lmcache} knows one KV group only"
    else:
        return None
    instead = "" if case.hints.recurrent else f"; to do without groups on purpose: {case.name}.args.{MANAGER_OFF}: true"
    return PreflightError(
        f"{guilty}: this model's KV would be kept in full for every layer, or not at all",
        where=f"{case.name}.connector",
        cause=case.why(),
        todo=f"{known.ONE_GROUP_IN_VLLM.todo}{instead}",
    )


def _engine_driven(case: _Case) -> PdserveError | None:
    if not case.hints.several or case.single_group:
        return None
    leaf = next(iter(effective.lmcache_leaves(case.connector)), None)
    if leaf is None or effective.transfer_mode_of(case.recipe, leaf)[1] != "engine_driven":
        return None
    way_out = "set lmcache.transfer_mode: lmcache_driven"
    if case.recipe.platform == "cpu" and len(effective.leaf_connectors(case.connector)) > 1:
        way_out += ", with lmcache-mp as the first child"
    if not case.hints.recurrent:
        way_out += f"; or keep windows as full attention: {case.name}.args.{MANAGER_OFF}: true"
    return RecipeError(
        "LMCache's engine_driven transfer takes one KV group, and vLLM makes several for this model: the engine would "
        "end when it registers its KV",
        where="lmcache.transfer_mode" if leaf.transfer_mode is None else f"{case.name}.connector",
        cause=case.why(),
        todo=way_out,
    )


def _chunks(case: _Case) -> PdserveError | None:
    """Refuse a chunk that does not fit the blocks that the recipe states: of each group, or the one size that a model
    with recurrent state has."""
    section = case.recipe.lmcache
    if section is None or not case.lmcache:
        return None
    groups, batched = _stated_groups(case), case.number("max-num-batched-tokens")
    dcp = case.number("decode-context-parallel-size") or 1
    if not groups or (why := lmcache_refusal(groups, section.chunk_size, dcp=dcp, max_batched_tokens=batched)) is None:
        return None
    step = batched is not None and lmcache_refusal(groups, section.chunk_size, dcp=dcp) is None
    chunk = good_chunk(groups, section.chunk_size, dcp)
    return RecipeError(
        f"LMCache would end at the start, and nothing could ever be stored: {why}",
        where=case.flag("max-num-batched-tokens") if step else "lmcache.chunk_size",
        todo=f"set {case.flag('max-num-batched-tokens')} to a whole block or more" if step else f"use {chunk}",
    )


def _stated_groups(case: _Case) -> Sequence[TableGroup]:
    if case.recipe.model.kv_group_blocks:
        return tuple(map(TableGroup, case.recipe.model.kv_group_blocks))
    block = case.number("block-size")
    if block is None or not case.hints.recurrent:
        return ()
    return (TableGroup(block), TableGroup(block, "recurrent"))


def _computed_groups(case: _Case) -> Sequence[TableGroup]:
    """Return the groups by the config.json, where its layers are known; none where they are not, or a flag cannot be
    counted with."""
    if case.config is None:
        return ()
    try:
        flags, _ = kv_flags(case.recipe, case.name, case.role, case.config)
        return table_groups(kv_cache(layers_of(case.config), flags))
    except (UnknownModelError, RecipeError):
        return ()


def _short_prompts(case: _Case) -> PdserveError | None:
    """Refuse prompts that fill no chunk: whole chunks alone are stored."""
    section, longest = case.recipe.lmcache, case.number("max-model-len")
    if section is None or not case.lmcache or longest is None or can_store(section.chunk_size, longest - 1):
        return None
    return RecipeError(
        f"no prompt fills a chunk of {section.chunk_size} tokens, so nothing would ever be stored: max-model-len is "
        f"{longest}, and one token of it is for the answer",
        where="lmcache.chunk_size",
        todo=f"use a smaller chunk, or a larger {case.flag('max-model-len')}",
    )


def _offloading_error(case: _Case) -> PdserveError | None:
    """Refuse blocks that vLLM's own connector for host memory cannot take, which only a raw connector can name."""
    blocks = case.recipe.model.kv_group_blocks
    if not isinstance(case.connector, RawSection) or "OffloadingConnector" not in case.classes or not blocks:
        return None
    extra = case.connector.config.get("kv_connector_extra_config")
    size = extra.get("block_size") if isinstance(extra, Mapping) else None
    why = offloading_refusal(tuple(map(TableGroup, blocks)), size) if isinstance(size, int) else None
    if why is None:
        return None
    return RecipeError(f"OffloadingConnector would end at the start: {why}", where=f"{case.name}.connector")


_RULES: tuple[Callable[[_Case], PdserveError | None], ...] = (
    _state_on_old_vllm,
    _drafts_in_state,
    _state_needs_the_manager,
    _manager_is_turned_off,
    _engine_driven,
    _chunks,
    _short_prompts,
    _offloading_error,
)


def _warnings(case: _Case) -> Iterator[str]:
    section = case.recipe.lmcache
    if section is not None and case.lmcache and case.hints.recurrent and not _stated_groups(case):
        groups = _computed_groups(case)
        if not groups:
            yield (
                "vLLM enlarges the block of this model to fit its recurrent state (its log: 'Setting attention block "
                f"size to N tokens'), and LMCache ends unless lmcache.chunk_size, {section.chunk_size}, is a multiple "
                f"of N: state N as {case.flag('block-size')}"
            )
        elif (why := lmcache_refusal(groups, section.chunk_size)) is not None:
            yield (
                f"{case.name}: by its config.json vLLM enlarges the block of this model to {groups[0].block} tokens, "
                f"and LMCache would end at the start: {why}; write lmcache.chunk_size: "
                f"{good_chunk(groups, section.chunk_size)}"
            )
    if case.lmcache and case.hints.recurrent:
        yield f"{case.name}: {_wrong_state_warning() if case.has(known.STATE_STORED_WRONG) else _STATE}"


def _wrong_state_warning() -> str:
    defect = known.STATE_STORED_WRONG
    return f"{defect.what} ({defect.source}): {defect.todo}"


_STATE = (
    "of the wrong KV that was reported where LMCache keeps that of models with recurrent state, the known causes are "
    "corrected in lmcache 0.5.6 (lmcache#4984, lmcache#4247); one report, of a load that continues a local prefix, has "
    "none: let `pdserve verify` compare a reload; where it differs, take LMCache off this model"
)
