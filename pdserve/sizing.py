"""The needs of a recipe, computed before anything starts: recipe and model facts to numbers. Pure.

Weights that vLLM quantizes while it loads them take less than the checkpoint, and by how much is a range. What is known
is vLLM 0.32's online quantization (config/quantization.py, layers/quantization/online/base.py): the matrices of linear
layers and experts get the bits of the method, and embeddings and the output layer stay as they are. Which layers are
left out depends on the method, on quantization-config and on the model's class. So the weights take what the checkpoint
has at most, and all their matrices at the bits of the method at least.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from pdserve.errors import RecipeError
from pdserve.models.config_json import is_quantized
from pdserve.models.kv_cache import (
    NULL_BLOCK,
    CacheGroup,
    KvCache,
    can_store,
    element_bytes,
    good_chunk,
    kv_cache,
    lmcache_refusal,
    table_groups,
)
from pdserve.models.layers import layers_of, text_config
from pdserve.models.weights import BITS, Sharding, Tensor, rank_weights
from pdserve.plan.frozen import Frozen
from pdserve.plan.model import LmcacheServer, Plan
from pdserve.plan.model_rules import drafts_for_itself, kv_flags
from pdserve.recipe import effective
from pdserve.recipe.effective import KV_MEMORY_FLAG, stated_kv_bytes
from pdserve.recipe.load.problems import dotted
from pdserve.recipe.model import Recipe, Role
from pdserve.recipe.rules.caches import SECONDS_A_GIB, STEP_SECONDS
from pdserve.recipe.rules.engines import flag_path
from pdserve.roles import EngineRole

GIB = 1 << 30


class SizingOptions(Frozen):
    """The options of `pdserve plan`."""

    device_gib: float | None = None
    """Memory of one device."""
    kv_gib: float | None = None
    """For KV on each rank: 'Available KV cache memory' of a log."""
    link_gbit: float | None = None
    """Between prefill and decode, bits in 10^9 a second."""
    disk_gb: float | None = None
    """The rate of the disk that weights are read from, bytes in 10^9 a second, for each node."""
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    prefill_rate: float | None = None
    """Prompt tokens a second of one prefill instance."""
    decode_rate: float | None = None
    """Tokens a second of one decode instance."""
    queue_seconds: float | None = None
    """The longest that a request waits between LMCache's lookup and its load."""


class Span(Frozen):
    """A number, or a range where no single number is known."""

    low: float
    high: float

    @property
    def exact(self) -> bool:
        """Return True if both ends are one number."""
        return self.low == self.high


_METHOD_BITS: Mapping[str, int] = {
    **dict.fromkeys(("fp8", "fp8_per_tensor", "fp8_per_block", "fp8_per_channel", "mxfp8"), 8),
    **dict.fromkeys(("int8_per_channel_weight_only", "experts_int8"), 8),
    **dict.fromkeys(("mxfp4", "nvfp4_per_token", "online"), 4),
}
"""Methods that take a checkpoint of 16 bits. `online` has them by quantization-config: 4 are the fewest there."""
_UNKNOWN_BITS = 4
"""Assumed of a method that is not known here."""
_STORED = frozenset(
    {
        *("awq", "auto_awq", "awq_marlin", "gptq", "auto_gptq", "gptq_marlin", "moe_wna16", "inc", "quark"),
        *("compressed-tensors", "modelopt", "modelopt_fp4", "modelopt_mxfp8", "modelopt_mixed", "fbgemm_fp8"),
        *("gpt_oss_mxfp4", "deepseek_v4_fp8"),
    }
)
"""Methods that load what a checkpoint has quantized already."""
_TYPES = {8: "F8_E4M3", 4: "F4"}
_KEPT = re.compile(r"embed|lm_head|\bwte\b|\bwpe\b|scale|bias")


def quantized_bits(args: Mapping[str, Any], config: Mapping[str, Any]) -> int | None:
    """Return the bits of the matrices that are quantized on the way; None: weights are loaded as they are stored."""
    method = args.get("quantization")
    if args.get("quantization-config") is not None:
        return _METHOD_BITS["online"]  # beside a quantized checkpoint too, for what that leaves out
    if method is None or method in _STORED or is_quantized(config):
        return None
    return _METHOD_BITS.get(str(method), _UNKNOWN_BITS)


def raise_bits(tensors: tuple[Tensor, ...], bits: int) -> tuple[Tensor, ...]:
    """Return the tensors with every matrix at so many bits."""
    return tuple(_quantize(tensor, bits) for tensor in tensors)


def assumption(args: Mapping[str, Any], bits: int) -> str:
    """Say what a reader has to know of the range of the weights."""
    method = args.get("quantization") or "quantization-config"
    return (
        f"weights between all matrices at {bits} bits and as they are stored: vLLM quantizes them while it loads them "
        f"({method}), and which layers it leaves out is not known here"
    )


def _quantize(tensor: Tensor, bits: int) -> Tensor:
    if len(tensor.shape) < 2 or BITS[tensor.dtype] <= bits or BITS[tensor.dtype] < 16 or _KEPT.search(tensor.name):
        return tensor
    return replace(tensor, dtype=_TYPES[bits])


UTILIZATION = 0.92
"""vLLM's default of gpu-memory-utilization from 0.22 on."""
BESIDE_KV_GIB = Span(low=0.4, high=8.2)
"""Activations, graphs and what is no tensor, of one rank: the smallest and the largest of the runs in docs/plan.md."""


class GroupSize(Frozen):
    """Holds the size of a KV cache group."""

    keeps: str
    layers: int
    block: int
    page_bytes: int
    """The bytes of one layer and block on one rank."""
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
    """The block of attention, as vLLM will have it, in tokens."""
    block_bytes: int
    token_bytes: float
    """On the rank that holds most layers."""
    groups: tuple[GroupSize, ...]
    blocks: Span | None
    """The blocks of one rank; each DP rank of an instance has as many."""
    requests: Span | None
    """The requests of max-model-len that fit in one instance at once, over its DP ranks."""
    tokens: Span | None
    """The same in tokens."""
    assumed: tuple[str, ...]


@dataclass(frozen=True)
class SizedRole:
    """A role, and the cache behind its numbers."""

    size: RoleSize
    cache: KvCache


def size_role(
    recipe: Recipe,
    name: EngineRole,
    role: Role,
    config: Mapping[str, Any],
    tensors: tuple[Tensor, ...] | None,
    given: SizingOptions,
) -> SizedRole:
    """Size the engines of a role: weights, KV, requests. Raises UnknownModelError for a model, RecipeError for what the
    recipe has that cannot be counted with."""
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
    return SizedRole(
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
    """Return the bytes of weights on one rank."""
    held = rank_weights(tensors, sharding)
    if (bits := quantized_bits(args, config)) is None:
        return Span(low=held.low, high=held.high)
    assumed.append(assumption(args, bits))
    return Span(low=rank_weights(raise_bits(tensors, bits), sharding).low, high=held.high)


def _kv_memory(
    recipe: Recipe,
    name: EngineRole,
    role: Role,
    args: Mapping[str, Any],
    weights: Span | None,
    given: SizingOptions,
    assumed: list[str],
) -> Span | None:
    """Return the bytes that one rank has for KV."""
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


_BITS_A_BYTE = 8


class RequestTransfer(Frozen):
    """The KV of one prompt."""

    prompt_tokens: int
    request_bytes: int
    copies: int
    """MLA: every TP rank of decode receives the whole."""
    seconds: float | None
    """Alone on the link at its full rate; None: no rate is given."""


class Balance(Frozen):
    """Requests a second that each side can do, all its instances together."""

    prefill: float
    decode: float

    @property
    def starved(self) -> str | None:
        """Return the side that has less to do than it could, by a quarter or more."""
        if max(self.prefill, self.decode) < _UNEVEN * min(self.prefill, self.decode):
            return None
        return "decode" if self.prefill < self.decode else "prefill"


_UNEVEN = 1.25


def request_transfer(decode: RoleSize, cache: KvCache, given: SizingOptions) -> RequestTransfer | None:
    """Return the KV of one prompt, by what the ranks of one decode instance receive. None without a length of
    prompts."""
    if given.prompt_tokens is None:
        return None
    of_rank = sum(
        group.page_bytes * len(group.layers) * _sent_blocks(group, given.prompt_tokens) for group in cache.groups
    )
    total = of_rank * decode.tp
    return RequestTransfer(
        prompt_tokens=given.prompt_tokens,
        request_bytes=total,
        copies=decode.tp if cache.ranks_share else 1,
        seconds=None if given.link_gbit is None else total * _BITS_A_BYTE / (given.link_gbit * 1e9),
    )


def _sent_blocks(group: CacheGroup, prompt_tokens: int) -> int:
    if group.keeps == "recurrent":
        return 1
    if group.keeps == "window":
        # NIXL and Mooncake send the window and a block more (nixl/base_scheduler.py, mooncake_connector.py:
        # blocks_per_sw), whatever else prefill holds while it computes.
        return min(math.ceil(prompt_tokens / group.block), math.ceil(group.reach / group.block) + 1)
    return min(math.ceil(prompt_tokens / group.block), group.blocks_a_request)


def request_balance(prefill: RoleSize, decode: RoleSize, given: SizingOptions) -> Balance | None:
    """Return the requests a second of each side; None where a length or a rate is missing."""
    prompt, output, filled, written = given.prompt_tokens, given.output_tokens, given.prefill_rate, given.decode_rate
    if prompt is None or output is None or filled is None or written is None:
        return None
    return Balance(prefill=prefill.instances * filled / prompt, decode=decode.instances * written / output)


class L1Size(Frozen):
    """One server, for the engines of one role. Tokens are at most: a group that forgets (windows, recurrent state) is
    counted as if every block of it were stored."""

    role: EngineRole
    per: str
    """node or tp-rank."""
    l1_gib: float
    token_bytes: float
    """The bytes of a token in this server: of all ranks, or of a rank where each has one. MLA alone is stored once."""
    tokens: int
    """That fit."""
    kept_tokens: int
    """At the watermark, where eviction starts."""
    chunk_bytes: float
    engines: int
    """The engines of this role beside one server, at most."""
    engine_tokens: float | None
    """What the KV cache of one engine holds, at most; None: not known."""
    pinned_gib: float
    """L1 and the KV that its engines register."""
    registration_seconds: float
    """By the rule of a second a GiB, seen on ROCm; on a CPU nothing is pinned."""
    shm_gib: float
    """The GiB of L1 in /dev/shm, and of the KV that engines on a CPU move there."""


def l1_sizes(recipe: Recipe, sized: Mapping[EngineRole, SizedRole], plan: Plan) -> list[L1Size]:
    """Return a size for each role that attaches."""
    section = recipe.lmcache
    if section is None:
        return []
    sizes = []
    for name, _, connector in effective.roles(recipe):
        if name not in section.on or not effective.lmcache_leaves(connector) or name not in sized:
            continue
        size, cache = sized[name].size, sized[name].cache
        ranks = size.tp * size.pp
        token = stored_token_bytes(cache, 1 if section.per == "tp-rank" else size.tp)
        room = section.l1_size_gb * GIB
        tokens = int(room / token)
        servers = [_engines_of(plan, server, name) for server in plan.lmcache]
        here, server = max(zip(servers, plan.lmcache, strict=True), key=lambda pair: pair[0])
        held = None if size.tokens is None else size.tokens.high
        registered = 0.0 if size.kv_bytes is None else size.kv_bytes.high * ranks * size.dp * here / GIB
        pinned = section.l1_size_gb + (registered / size.tp if section.per == "tp-rank" else registered)
        sizes.append(
            L1Size(
                role=name,
                per=section.per,
                l1_gib=section.l1_size_gb,
                token_bytes=token,
                tokens=tokens,
                kept_tokens=int(tokens * section.eviction.watermark),
                chunk_bytes=token * section.chunk_size,
                engines=here,
                engine_tokens=held,
                pinned_gib=pinned,
                registration_seconds=0.0 if recipe.platform == "cpu" else pinned * SECONDS_A_GIB,
                shm_gib=(section.l1_size_gb if section.shm_name else 0.0) + server.kv_bytes_on_host / GIB,
            )
        )
    return sizes


def _engines_of(plan: Plan, server: LmcacheServer, role: EngineRole) -> int:
    return sum(plan.process(engine).role == role for engine in server.engines)


def stored_token_bytes(cache: KvCache, tp: int) -> float:
    """Return the bytes of one token over all layers. Ranks whose KV is the same are stored once (LMCache's
    mla_only)."""
    return cache.token_bytes * (1 if cache.ranks_share else tp)


Severity = Literal["error", "warning"]
"""error: the deployment does not start, or part of it can never work."""


class Crossing(Frozen):
    """One edge that is crossed."""

    severity: Severity
    where: str
    """Key of the recipe."""
    what: str
    todo: str


def crossings(
    recipe: Recipe,
    sized: Mapping[EngineRole, SizedRole],
    l1: Sequence[L1Size],
    balance: Balance | None,
    given: SizingOptions,
) -> Iterator[Crossing]:
    """Yield all edges that the sizes cross."""
    for entry in sized.values():
        yield from _fits(recipe, entry)
        yield from _chunks(recipe, entry)
    for server in l1:
        yield from _write_only(recipe, server)
        yield from _registration(recipe, server)
    yield from _lease(recipe, given)
    yield from _ratio(balance)


def _fits(recipe: Recipe, entry: SizedRole) -> Iterator[Crossing]:
    size, cache = entry.size, entry.cache
    if size.blocks is None:
        return
    usable_low, usable_high = int(size.blocks.low) - NULL_BLOCK, int(size.blocks.high) - NULL_BLOCK
    if cache.blocks_a_request <= usable_low:
        return
    never = cache.blocks_a_request > usable_high
    longest = cache.longest_request(usable_high if never else usable_low)
    key = dotted(flag_path(recipe, size.role, "max-model-len"))
    shorter = f"lower max-model-len of every role to {longest} or less ({key}), " if longest else ""
    yield Crossing(
        severity="error" if never else "warning",
        where=key,
        what=f"a request of {size.model_len} tokens needs {cache.blocks_a_request} blocks, and a rank of {size.role} "
        f"can use {_range(max(usable_low, 0), max(usable_high, 0))}: vLLM {'refuses' if never else 'may refuse'} to "
        "start",
        todo=f"{shorter}raise {size.role}.parallel.tp, or give KV more memory",
    )


def _chunks(recipe: Recipe, entry: SizedRole) -> Iterator[Crossing]:
    section, size = recipe.lmcache, entry.size
    if section is None or size.role not in section.on:
        return
    groups = table_groups(entry.cache)
    if any(group.mode == "none" for group in groups):
        yield Crossing(
            severity="error",
            where=f"{size.role}.args.enable-prefix-caching",
            what="without prefix caching vLLM keeps no recurrent state that LMCache could store",
            todo=f"remove {size.role}.args.enable-prefix-caching",
        )
        return
    if (why := lmcache_refusal(groups, section.chunk_size)) is not None:
        # On a GPU the block of a model with state is computed for the usual attention backends only.
        sure = recipe.platform == "cpu" or all(group.kind == "attention" for group in groups)
        yield Crossing(
            severity="error" if sure else "warning",
            where="lmcache.chunk_size",
            what=f"LMCache would end at the start: {why}",
            todo=f"write lmcache.chunk_size: {good_chunk(groups, section.chunk_size)}",
        )
    if not can_store(section.chunk_size, size.model_len - 1):
        smaller = good_chunk(groups, max(size.model_len // 4, 1))
        fits = can_store(smaller, size.model_len - 1)
        key = dotted(flag_path(recipe, size.role, "max-model-len"))
        yield Crossing(
            severity="error",
            where="lmcache.chunk_size",
            what=f"no prompt of at most {size.model_len - 1} tokens fills a chunk of {section.chunk_size} tokens: "
            "nothing would ever be stored",
            todo=f"write lmcache.chunk_size: {smaller}" if fits else f"write {key}: {2 * smaller} or more",
        )


def _write_only(recipe: Recipe, server: L1Size) -> Iterator[Crossing]:
    if server.engine_tokens is None:
        return
    held = server.engine_tokens * server.engines
    if server.kept_tokens >= held:
        return
    needed = math.ceil(server.l1_gib * held / server.kept_tokens) if server.kept_tokens else 1
    if server.engines == 1:
        who, reader = f"an engine of {server.role} holds up to {int(held)} itself", "after a restart of the engine"
    else:
        who = f"the {server.engines} engines of {server.role} beside it hold up to {int(held)} themselves"
        reader = "by another engine, or after a restart"
    yield Crossing(
        severity="warning",
        where="lmcache.l1_size_gb",
        what=f"L1 keeps {server.kept_tokens} tokens, and {who}: what an engine evicts has left L1 already, so L1 is "
        f"read only {reader}",
        todo=f"write lmcache.l1_size_gb: {needed} or more, or take {server.role} out of lmcache.on",
    )


def _registration(recipe: Recipe, server: L1Size) -> Iterator[Crossing]:
    section = recipe.lmcache
    if section is None or recipe.platform != "rocm" or section.mq_timeout_seconds >= server.registration_seconds:
        return
    advised = math.ceil(server.registration_seconds / STEP_SECONDS) * STEP_SECONDS
    yield Crossing(
        severity="warning",
        where="lmcache.mq_timeout_seconds",
        what=f"{server.pinned_gib:.0f} GiB are pinned and mapped while engines register, about "
        f"{server.registration_seconds:.0f} s at a second a GiB, and the engines give up after "
        f"{section.mq_timeout_seconds:g} s",
        todo=f"write lmcache.mq_timeout_seconds: {advised}",
    )


def _lease(recipe: Recipe, given: SizingOptions) -> Iterator[Crossing]:
    section = recipe.lmcache
    if section is None or given.queue_seconds is None or given.queue_seconds < section.l1_read_ttl_seconds:
        return
    yield Crossing(
        severity="warning",
        where="lmcache.l1_read_ttl_seconds",
        what=f"a request waits up to {given.queue_seconds:g} s, and the lease of what was looked up for it ends after "
        f"{section.l1_read_ttl_seconds} s: it would be there and not readable",
        todo=f"write lmcache.l1_read_ttl_seconds: {math.ceil(2 * given.queue_seconds)}",
    )


def _ratio(balance: Balance | None) -> Iterator[Crossing]:
    if balance is None or balance.starved is None:
        return
    full = "decode" if balance.starved == "prefill" else "prefill"
    ratio = max(balance.prefill, balance.decode) / min(balance.prefill, balance.decode)
    yield Crossing(
        severity="warning",
        where=f"{full}.instances",
        what=f"prefill can do {balance.prefill:.3g} requests a second and decode {balance.decode:.3g}: "
        f"{balance.starved} is used to {1 / ratio:.0%}",
        todo=f"give {full} {ratio:.2g} times its instances, or {balance.starved} fewer",
    )


def _range(low: int, high: int) -> str:
    return f"{low}" if low == high else f"{low} to {high}"


ENGINE_START_SECONDS = Span(low=30, high=120)
"""Imports, compilation and graphs of an engine, beside its weights: the sources are in docs/plan.md."""


class StartTime(Frozen):
    """The time from the start of the engines until they serve."""

    weights_bytes: int
    read_seconds: float | None
    """Each node reads the files once; its ranks share the page cache. None: the disk's speed is not given."""
    engine_seconds: Span


class Sizing(Frozen):
    """Holds everything that `pdserve plan` prints."""

    name: str
    model: str
    architecture: str
    roles: tuple[RoleSize, ...]
    l1: tuple[L1Size, ...]
    transfer: RequestTransfer | None
    balance: Balance | None
    start: StartTime | None
    crossings: tuple[Crossing, ...]
    lacking: str | None = None
    """Files of weights that are not here, while others are: none of them is counted."""


def size_recipe(
    recipe: Recipe,
    plan: Plan,
    config: Mapping[str, Any],
    tensors: tuple[Tensor, ...] | None,
    file_bytes: int,
    given: SizingOptions,
) -> Sizing:
    """Size a recipe: its roles, LMCache's servers, transfers, balance and start. Raises UnknownModelError and
    RecipeError, as `size_role` does."""
    sized: dict[EngineRole, SizedRole] = {
        name: size_role(recipe, name, role, config, tensors, given) for name, role in recipe.roles()
    }
    servers = l1_sizes(recipe, sized, plan)
    moved = rates = None
    if "prefill" in sized and "decode" in sized:
        prefill, decode = sized["prefill"], sized["decode"]
        if any(effective.transfers_of(connector) for _, _, connector in effective.roles(recipe)):
            moved = request_transfer(decode.size, decode.cache, given)
        rates = request_balance(prefill.size, decode.size, given)
    architectures = config.get("architectures") or [str(config.get("model_type", "unknown"))]
    return Sizing(
        name=recipe.name,
        model=plan.model,
        architecture=str(architectures[0]),
        roles=tuple(entry.size for entry in sized.values()),
        l1=tuple(servers),
        transfer=moved,
        balance=rates,
        start=None
        if not file_bytes
        else StartTime(
            weights_bytes=file_bytes,
            read_seconds=None if given.disk_gb is None else file_bytes / (given.disk_gb * 1e9),
            engine_seconds=ENGINE_START_SECONDS,
        ),
        crossings=tuple(crossings(recipe, sized, servers, rates, given)),
    )


_MIB, _KIB = 1 << 20, 1 << 10
_UNKNOWN = "not known"


def sizing_rows(sizing: Sizing) -> Iterator[tuple[str, str, str]]:
    """Yield each row: its subject, its label, its value."""
    yield sizing.name, "model", f"{sizing.model} ({sizing.architecture})"
    if sizing.lacking is not None:
        yield sizing.name, "weights", f"not counted: this machine lacks {sizing.lacking}"
    for role in sizing.roles:
        yield from ((str(role.role), label, value) for label, value in _role(role))
    for server in sizing.l1:
        yield from ((f"L1 of {server.role}", label, value) for label, value in _l1(server))
    if (moved := sizing.transfer) is not None:
        copies = f", {moved.copies} copies" if moved.copies > 1 else ""
        yield "transfer", f"KV of {moved.prompt_tokens} tokens", f"{_size(moved.request_bytes)}{copies}"
        if moved.seconds is not None:
            yield "transfer", "alone on the link", f"{moved.seconds:.3g} s"
    if (rates := sizing.balance) is not None:
        yield "balance", "prefill", f"{rates.prefill:.3g} requests a second"
        yield "balance", "decode", f"{rates.decode:.3g} requests a second"
    if (start := sizing.start) is not None:
        read = (
            "at a speed that is not given (--disk)" if start.read_seconds is None else f"in {start.read_seconds:.0f} s"
        )
        yield "start", "weights to read on a node", f"{_size(start.weights_bytes)} {read}"
        yield "start", "engine beside them", f"{_span(start.engine_seconds, '.0f')} s"


def _role(role: RoleSize) -> Iterator[tuple[str, str]]:
    ranks = role.tp * role.pp * role.dp
    yield "instances", f"{role.instances} of {ranks} rank(s): TP {role.tp}, PP {role.pp}, DP {role.dp}"
    yield "weights of a rank", _UNKNOWN if role.weights_bytes is None else _sizes(role.weights_bytes)
    yield "KV of a token and rank", _size(role.token_bytes)
    yield (
        "KV groups",
        ", ".join(
            f"{group.layers} x {group.keeps} (block {group.block}, page {_size(group.page_bytes)}"
            + (f", {group.padding:.1%} padding)" if group.padding else ")")
            for group in role.groups
        ),
    )
    yield "bytes of a block", _size(role.block_bytes)
    yield (
        "memory for KV",
        f"{_UNKNOWN} (--device-memory or --kv-memory)" if role.kv_bytes is None else _sizes(role.kv_bytes),
    )
    if role.blocks is not None and role.requests is not None and role.tokens is not None:
        yield "blocks of a rank", _span(role.blocks, ".0f")
        yield f"requests of {role.model_len} tokens", f"{_span(role.requests, '.2f')} at once in an instance"
        yield "tokens", f"{_span(role.tokens, ',.0f')} in an instance"
    for text in role.assumed:
        yield "assumed", text


def _l1(server: L1Size) -> Iterator[tuple[str, str]]:
    yield "size", f"{server.l1_gib:g} GiB, one a {server.per}"
    yield "KV of a token", f"{_size(server.token_bytes)}; of a chunk {_size(server.chunk_bytes)}"
    yield "tokens", f"{server.tokens:,} at most, {server.kept_tokens:,} before eviction starts"
    if server.engine_tokens is not None:
        yield "tokens in one of its engines", f"{server.engine_tokens:,.0f} at most"
    if server.registration_seconds:
        yield "to register", f"{server.pinned_gib:.0f} GiB, about {server.registration_seconds:.0f} s at a second a GiB"
    if server.shm_gib:
        yield "in /dev/shm", f"{server.shm_gib:g} GiB"


def _span(span: Span, style: str) -> str:
    return format(span.low, style) if span.exact else f"{span.low:{style}} to {span.high:{style}}"


def _sizes(span: Span) -> str:
    return _size(span.low) if span.exact else f"{_size(span.low)} to {_size(span.high)}"


def _size(size: float) -> str:
    for unit, name in ((GIB, "GiB"), (_MIB, "MiB"), (_KIB, "KiB")):
        if size >= unit:
            return f"{size / unit:.4g} {name}"
    return f"{size:g} bytes"
