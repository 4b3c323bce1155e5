"""The KV cache of one engine rank: vLLM 0.32's groups, blocks and concurrency, from layers and flags.

Every block of the pool has the same size, and every group of layers takes its blocks from it by a table of its own
(vllm/v1/core/kv_cache_utils.py: get_kv_cache_groups, get_kv_cache_configs, get_max_concurrency_for_kv_cache_config).
Written for layouts in which the layer is the outer dimension, which are the default wherever all pages have one size.

vLLM gives layers of one kind (full attention, a sliding window, recurrent state) block tables of their own, a group
each, and their blocks may span different numbers of tokens. LMCache stores a chunk over all groups at once, so a chunk
must consist of whole blocks of each. The rules are those of lmcache 0.5.6 (get_vllm_scheduler_block_size,
validate_mamba_step_alignment, validate_kv_cache_groups, GetStoreMetadata) and of vllm 0.32 (offloading/config.py);
tests/upstream/test_hybrid_groups.py compares.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from pdserve.models.config_json import UnknownModelError
from pdserve.models.layers import Keeps, Layer

_ELEMENT_BYTES = {"float32": 4.0, "float16": 2.0, "half": 2.0, "bfloat16": 2.0, "fp8": 1.0, "int8": 1.0}
_NVFP4 = 1 / 2 + 1 / 16
"""Half a byte for an element, and a byte of scale for sixteen (nvfp4_kv_cache_full_dim)."""
_PACKED_MLA = {"fp8_ds_mla": 656, "nvfp4_ds_mla": 352}
"""Bytes of a token, whatever the model."""
_MLA_ALIGNMENT = 128
NULL_BLOCK = 1
"""Of each pool: vLLM keeps it for itself."""
_UNEVEN = 1.5
"""Below this ratio vLLM pads groups to the largest kind of layers instead of splitting by the smallest."""


@dataclass(frozen=True)
class KvFlags:
    """Holds the part of the KV cache that flags and platform decide. `model_len` and `in_flight` only count blocks of a
    request."""

    model_len: int
    block_size: int
    kernel_block: int
    """The smallest block of the attention backend: 16 on GPUs, 32 on CPUs."""
    dtype: str = "bfloat16"
    """The dtype of the model."""
    cache_dtype: str = "auto"
    state_dtype: str | None = None
    """The dtype of recurrent state; None: what the model asks for."""
    tp: int = 1
    pp: int = 1
    prefix_caching: bool = True
    hybrid_manager: bool = True
    in_flight: int = 2048
    """Tokens that are scheduled and not settled: batches in flight times max-num-batched-tokens."""
    draft_tokens: int = 0


@dataclass(frozen=True)
class CacheGroup:
    """Layers with one block table."""

    keeps: Keeps
    block: int
    """Tokens of a block."""
    page_bytes: int
    """The bytes of one layer and block on one rank, as they are allocated."""
    used_bytes: int
    """The part of it that holds KV or state."""
    layers: tuple[int, ...]
    blocks_a_request: int
    """At max-model-len."""
    latent: bool = False
    reach: int = 0
    """Tokens of the window or of the chunk."""


@dataclass(frozen=True)
class KvCache:
    """The KV cache of one rank, before it has memory."""

    flags: KvFlags
    groups: tuple[CacheGroup, ...]
    block_bytes: int
    """The bytes of one block of the pool, on the rank that holds most layers."""
    rank_token_bytes: float
    """What the blocks of one token take on that rank when every group keeps every token."""
    ranks_share: bool
    """All that is kept is the same on every TP rank (MLA alone)."""

    @property
    def token_bytes(self) -> float:
        """Return the bytes of a token over all pipeline stages, one rank of each."""
        return sum(group.page_bytes * len(group.layers) / group.block for group in self.groups)

    @property
    def blocks_a_request(self) -> int:
        """Return the blocks of a request of max-model-len, over all groups."""
        return sum(group.blocks_a_request for group in self.groups)

    def blocks(self, memory: int) -> int:
        """Return the blocks that fit into so many bytes, the null block among them."""
        return memory // self.block_bytes

    def concurrency(self, blocks: int) -> float:
        """Return the requests of max-model-len that fit at once: 'Maximum concurrency' of vLLM's log."""
        return blocks / self.blocks_a_request

    def longest_request(self, blocks: int) -> int:
        """Return the tokens, in whole blocks, of the longest request that so many blocks hold; 0: of none. Groups that
        forget are counted with what they hold at max-model-len."""
        full = [group for group in self.groups if group.keeps == "full"]
        rest = blocks - sum(group.blocks_a_request for group in self.groups if group.keeps != "full")
        if not full or rest < len(full):
            return 0
        return rest // len(full) * min(group.block for group in full)

    def tokens(self, blocks: int) -> int:
        """Return the 'KV cache size' of vLLM 0.32's log: requests of max-model-len that fit, times max-model-len.
        (Before, it multiplied blocks by their tokens, which is wrong where there are several groups: vllm#40691.)"""
        return int(self.concurrency(blocks) * self.flags.model_len)


@dataclass(frozen=True)
class _Spec:
    """The properties that layers of one group share."""

    keeps: Keeps
    block: int
    used: int
    page: int
    reach: int
    latent: bool
    checkpoints: int = 0


def kv_cache(layers: Sequence[Layer], flags: KvFlags) -> KvCache:
    """Compute the KV cache that vLLM makes for these layers. Raises UnknownModelError for what is not known here."""
    if not layers:
        raise UnknownModelError("none of its layers keeps KV")
    flags = _align_block(layers, flags)
    specs = {layer.index: _spec(layer, flags) for layer in layers}
    if not flags.hybrid_manager and any(spec.keeps == "full" for spec in specs.values()):
        specs = {index: _as_full(spec) for index, spec in specs.items()}
    buckets = _buckets(specs)
    kinds = {(spec.keeps, spec.reach) for spec in specs.values()}
    if len(buckets) > 1 and kinds == {("full", 0)}:
        raise UnknownModelError("its layers keep KV of different sizes")
    if len(buckets) > 1:
        buckets = _buckets(_one_page(specs))
        size = _group_size([len(indices) for _, indices in buckets])
        buckets = [(spec, part) for spec, indices in buckets for part in _parts(indices, size)]
    groups = tuple(
        CacheGroup(
            keeps=spec.keeps,
            block=spec.block,
            page_bytes=spec.page,
            used_bytes=spec.used,
            layers=tuple(indices),
            blocks_a_request=_blocks_a_request(spec, flags),
            latent=spec.latent,
            reach=spec.reach,
        )
        for spec, indices in buckets
    )
    number = max(layer.index for layer in layers) + 1
    stages = [range(*bounds) for bounds in stage_bounds(number, flags.pp)]
    return KvCache(
        flags,
        groups,
        block_bytes=max(_bytes_of(group, stage) for group in groups for stage in stages),
        rank_token_bytes=max(sum(_bytes_of(group, stage) / group.block for group in groups) for stage in stages),
        ranks_share=all(spec.latent for spec in specs.values()),
    )


def _bytes_of(group: CacheGroup, stage: range) -> int:
    """Return the bytes of a block in the layers of a pipeline stage."""
    return sum(1 for index in group.layers if index in stage) * group.page_bytes


def stage_bounds(layers: int, pp: int) -> list[tuple[int, int]]:
    """Return the first layer, and the layer after the last, of each pipeline stage (vLLM's get_pp_indices)."""
    if pp > layers:
        raise UnknownModelError(f"{layers} layers cannot be spread over {pp} pipeline stages")
    sizes = [layers // pp] * pp
    for back in range(2, layers % pp + 2):
        sizes[-back] += 1
    ends = [sum(sizes[: stage + 1]) for stage in range(pp)]
    return [(end - size, end) for end, size in zip(ends, sizes, strict=True)]


def element_bytes(dtype: str) -> float:
    """Return the bytes of one element of a KV cache type. Raises UnknownModelError for a type whose layout is not known
    here."""
    name = "fp8" if dtype.startswith("fp8") and not dtype.endswith("mla") else dtype
    if dtype in ("nvfp4", "nvfp4_4over6"):
        return _NVFP4
    if name not in _ELEMENT_BYTES:
        raise UnknownModelError(f"the bytes of an element of kv-cache-dtype {dtype} are not known here")
    return _ELEMENT_BYTES[name]


def _attention_bytes(layer: Layer, flags: KvFlags) -> int:
    """Return the bytes of a token on one rank."""
    dtype = flags.dtype if flags.cache_dtype == "auto" else flags.cache_dtype
    if layer.latent and dtype in _PACKED_MLA:
        return _PACKED_MLA[dtype]
    if layer.latent and dtype.startswith("nvfp4"):
        raise UnknownModelError(f"the layout of MLA with kv-cache-dtype {dtype} is not known here")
    return _positive(int(layer.elements(flags.tp) * element_bytes(dtype)), layer)


def _state_bytes(layer: Layer, flags: KvFlags) -> int:
    assert layer.state is not None
    if layer.state.groups > 1 and layer.state.groups % flags.tp:
        raise UnknownModelError(
            f"vLLM does not divide the {layer.state.groups} groups of its recurrent state over TP {flags.tp}"
        )
    wanted = flags.state_dtype or layer.state.dtype or flags.dtype
    convolution = layer.state.convolution(flags.tp, flags.draft_tokens) * element_bytes(flags.dtype)
    return _positive(int(convolution + layer.state.recurrent(flags.tp) * element_bytes(wanted)), layer)


def _positive(size: int, layer: Layer) -> int:
    """Check a size. One so small that a rank has nothing of a layer is refused: no blocks could be made of that."""
    if size < 1:
        raise UnknownModelError(f"nothing is left of layer {layer.index} on each rank, whose sizes are too small")
    return size


def _align_block(layers: Sequence[Layer], flags: KvFlags) -> KvFlags:
    """Enlarge the block as vLLM does: with recurrent layers it enlarges the block until a page of attention holds a
    state (Platform._align_hybrid_block_size)."""
    states = [_state_bytes(layer, flags) for layer in layers if layer.state is not None]
    attention = [layer for layer in layers if layer.state is None]
    if not states or not attention:
        return flags
    token = max(_attention_bytes(layer, flags) for layer in attention)
    step = max(flags.kernel_block, flags.block_size, _MLA_ALIGNMENT if attention[0].latent else 0)
    block = _up(step * -(-max(states) // (step * token)), flags.kernel_block)
    return replace(flags, block_size=max(flags.block_size, block))


def _spec(layer: Layer, flags: KvFlags) -> _Spec:
    block = flags.block_size
    if layer.state is not None:
        used = _state_bytes(layer, flags)
        length = block if flags.prefix_caching else flags.model_len
        return _Spec("recurrent", length, used, used, 0, latent=False, checkpoints=layer.state.checkpoints)
    token = _attention_bytes(layer, flags)
    if layer.keeps == "window":
        # A window takes the largest block of its backend that is no larger than the others'.
        block = max(flags.kernel_block, block // flags.kernel_block * flags.kernel_block)
    return _Spec(layer.keeps, block, token * block, token * block, layer.reach, layer.latent)


def _as_full(spec: _Spec) -> _Spec:
    return replace(spec, keeps="full", reach=0) if spec.keeps in ("window", "chunk") else spec


def _one_page(specs: dict[int, _Spec]) -> dict[int, _Spec]:
    """Enlarge smaller blocks, or pad their pages, to the largest page (unify_kv_cache_spec_page_size)."""
    page = max(spec.page for spec in specs.values())
    made = {}
    for index, spec in specs.items():
        ratio, rest = divmod(page, spec.page)
        if spec.keeps == "recurrent" or (rest and not spec.latent):
            made[index] = replace(spec, page=page)
        elif rest:
            raise UnknownModelError("vLLM cannot bring its MLA and its other layers to one size of a block")
        else:
            made[index] = replace(spec, block=spec.block * ratio, used=spec.used * ratio, page=page)
    return made


def _buckets(specs: dict[int, _Spec]) -> list[tuple[_Spec, list[int]]]:
    buckets: dict[_Spec, list[int]] = {}
    for index, spec in specs.items():
        buckets.setdefault(spec, []).append(index)
    return list(buckets.items())


def _group_size(counts: Sequence[int]) -> int:
    return max(counts) if max(counts) < min(counts) * _UNEVEN else min(counts)


def _parts(indices: list[int], size: int) -> list[list[int]]:
    parts = -(-len(indices) // size)
    return [indices[part::parts] for part in range(parts)]


def _blocks_a_request(spec: _Spec, flags: KvFlags) -> int:
    if spec.keeps == "recurrent":
        return (2 + spec.checkpoints if flags.prefix_caching else 1) + flags.draft_tokens
    if spec.keeps == "full":
        return math.ceil(flags.model_len / spec.block)
    if spec.keeps == "chunk":
        return math.ceil(min(spec.reach + flags.in_flight, flags.model_len) / spec.block)
    held = min(spec.reach - 1 + max(0, flags.draft_tokens - 1) + flags.in_flight, flags.model_len)
    return math.ceil(held / spec.block) + 1


def _up(value: int, step: int) -> int:
    return -(-value // step) * step


MambaMode = Literal["none", "align", "all"]


@dataclass(frozen=True)
class TableGroup:
    """Describes one block table. `block`: tokens of a block, as the group's own spec has it."""

    block: int
    kind: Literal["attention", "recurrent", "scratch"] = "attention"
    """recurrent: state snapshots (Mamba, GDN, linear attention). scratch: never cached, it covers no tokens."""
    mode: MambaMode = "align"
    """The mode of a recurrent group: when its state is kept."""

    def span(self, dcp: int = 1) -> int:
        """Return the tokens of the whole sequence behind one block id. Under decode context parallelism an attention
        block is one rank's share; recurrent state is on every rank."""
        if self.kind == "scratch":
            return 0
        return self.block * dcp if self.kind == "attention" else self.block


def table_groups(cache: KvCache) -> tuple[TableGroup, ...]:
    """Return the groups of a cache as LMCache sees them."""
    mode: MambaMode = "align" if cache.flags.prefix_caching else "none"
    return tuple(
        TableGroup(group.block, "recurrent", mode) if group.keeps == "recurrent" else TableGroup(group.block)
        for group in cache.groups
    )


def scheduler_block(groups: Sequence[TableGroup], dcp: int = 1) -> int:
    """Return the step that all groups have in common: the least common multiple of their spans. ValueError without
    groups that cover tokens."""
    spans = [span for group in groups if (span := group.span(dcp)) > 0]
    if not spans:
        raise ValueError("no group covers tokens")
    return math.lcm(*spans)


def lmcache_refusal(
    groups: Sequence[TableGroup], chunk: int, *, dcp: int = 1, max_batched_tokens: int | None = None
) -> str | None:
    """Return why LMCache's connector or its registration refuses these groups with chunks of so many tokens; None: it
    takes them. `max_batched_tokens`: of vLLM's scheduler; None: not known."""
    unkept = [index for index, group in enumerate(groups) if group.kind == "recurrent" and group.mode == "none"]
    if unkept:
        return f"group {unkept[0]} keeps no recurrent state that could be stored (mamba-cache-mode none)"
    aligned = {group.block for group in groups if group.kind == "recurrent" and group.mode == "align"}
    if len(aligned) > 1:
        return f"recurrent groups with blocks of different sizes: {_number_list(sorted(aligned))}"
    if aligned and max_batched_tokens is not None and max_batched_tokens < max(aligned):
        return (
            f"a step of {max_batched_tokens} tokens (max-num-batched-tokens) never fills a block of recurrent state, "
            f"which has {max(aligned)}"
        )
    block = scheduler_block(groups, dcp)
    if chunk % block:
        spans = sorted({span for group in groups if (span := group.span(dcp))}, reverse=True)
        return f"a chunk of {chunk} tokens does not consist of whole blocks of {_number_list(spans)} tokens"
    return None


def can_store(chunk: int, longest_prompt: int) -> bool:
    """Return whether any prompt fills a chunk: only whole chunks of a prompt are stored. `longest_prompt`: one less
    than max-model-len, because vLLM wants room for a token of output."""
    return chunk <= longest_prompt


def good_chunk(groups: Sequence[TableGroup], wanted: int, dcp: int = 1) -> int:
    """Return the chunk size closest below `wanted` that consists of whole blocks of every group, or the smallest there
    is."""
    block = scheduler_block(groups, dcp)
    return max(wanted // block, 1) * block


def offloading_refusal(groups: Sequence[TableGroup], block_size: int | None, *, dcp: int = 1) -> str | None:
    """Return why vLLM's own OffloadingConnector refuses these groups with `block_size` in its extra config (None: not
    set, it then offloads block by block, each group by its own)."""
    spans = sorted({span for group in groups if (span := group.span(dcp))}, reverse=True)
    if not spans:
        return "no group covers tokens"
    if block_size is None:
        return None
    if len(spans) > 1:
        sizes = _number_list(spans)
        return f"block_size needs groups with blocks of one size, and these have {sizes}: use blocks_per_chunk"
    if block_size % spans[0]:
        return f"block_size {block_size} is not a multiple of the KV block, {spans[0]} tokens"
    return None


def _number_list(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
