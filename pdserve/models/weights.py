"""Bytes of weights that each rank of an engine holds, from the names, types and shapes of a model's tensors.

Which tensors are cut over TP ranks, dealt out over EP ranks or held whole follows vLLM's linear and MoE layers. What is
of an unknown name is counted twice, cut and whole: the answer is a range where there is such a tensor.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from pdserve.models.kv_cache import stage_bounds

BITS: Mapping[str, int] = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("BOOL", "I8", "U8", "F8_E8M0", "F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}
"""Of an element, for every type of safetensors."""
_FP32 = "F32"
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")
_EXPERT = re.compile(r"\.experts\.(?!shared)")
_CUT = re.compile(
    r"(embed_tokens|lm_head|wte|word_embeddings|output\.weight"
    r"|[qkvo]_proj|qkv_proj|W_pack|c_attn|q_b_proj|kv_b_proj|out_proj|in_proj\w*|conv1d|o_b_proj|query_key_value"
    r"|gate_proj|up_proj|down_proj|gate_up_proj|w[123]\b|dense_h_to_4h|dense_4h_to_h|c_fc|c_proj|c_mlp"
    r"|A_log|\.D$|dt_bias|dt_proj|x_proj|sinks)"
)
_KEYS_AND_VALUES = re.compile(r"\.[kv]_proj\.")
_WHOLE = re.compile(
    r"(norm|layernorm|\.gate\.|router|q_a_proj|kv_a_proj|shared_expert_gate|rotary|inv_freq|e_score_correction"
    r"|(?:input|k|v|q|kv)_scale$|\.[kv]_scale|post_attention|ln_)"
)
_DRAFT = re.compile(r"(^|\.)(mtp|mtp_block|nextn)\.")
_VISION = re.compile(r"(^|\.)(vision\w*|visual|vit|audio\w*|image_newline|multi_modal_projector|mm_projector)\b")


@dataclass(frozen=True)
class Tensor:
    """A tensor of a checkpoint."""

    name: str
    dtype: str
    """The dtype in the words of safetensors: F32, BF16, F8_E4M3, ..."""
    shape: tuple[int, ...]

    @property
    def stored_bytes(self) -> int:
        """Return the bytes in the file."""
        return math.prod(self.shape) * BITS[self.dtype] // 8

    def loaded_bytes(self, model_bytes: int) -> int:
        """Return the bytes on the device: floating-point numbers of 32 bits take the model's type, unless they are
        scales."""
        if self.dtype == _FP32 and "scale" not in self.name and "correction" not in self.name:
            return math.prod(self.shape) * model_bytes
        return self.stored_bytes


@dataclass(frozen=True)
class Sharding:
    """The spread of one instance over ranks, and the part of the checkpoint that it loads."""

    layers: int
    """num_hidden_layers."""
    kv_heads: int
    tp: int = 1
    pp: int = 1
    dp: int = 1
    tied: bool = False
    """The output layer is the embedding."""
    drafts: bool = False
    """The model's own MTP modules are loaded."""
    model_bytes: int = 2
    """The bytes of an element of the model's dtype."""


@dataclass(frozen=True)
class Bytes:
    """Is a range of bytes; both ends are equal where all is known."""

    low: int
    high: int

    def __add__(self, other: Bytes) -> Bytes:
        return Bytes(self.low + other.low, self.high + other.high)


def rank_weights(tensors: Collection[Tensor], sharding: Sharding) -> Bytes:
    """Return the bytes of the rank that holds most."""
    stages = [range(*bounds) for bounds in stage_bounds(sharding.layers, sharding.pp)]
    totals = []
    for number, stage in enumerate(stages):
        parts = (_share(tensor, sharding) for tensor in _of_stage(tensors, sharding, stage, number, len(stages)))
        totals.append(sum(parts, Bytes(0, 0)))
    return max(totals, key=lambda total: total.high)


def loaded_tensors(tensors: Collection[Tensor], sharding: Sharding) -> Iterator[Tensor]:
    """Yield the tensors without what vLLM skips: MTP modules that are not used, an output layer that is tied,
    precomputed angles."""
    for tensor in tensors:
        index = _index(tensor)
        if not sharding.drafts and (_DRAFT.search(tensor.name) or (index is not None and index >= sharding.layers)):
            continue
        if sharding.tied and "lm_head" in tensor.name:
            continue
        if "inv_freq" not in tensor.name:
            yield tensor


def _of_stage(
    tensors: Collection[Tensor], sharding: Sharding, stage: range, number: int, stages: int
) -> Iterator[Tensor]:
    last = number == stages - 1
    for tensor in loaded_tensors(tensors, sharding):
        index = _index(tensor)
        if index is not None and index < sharding.layers:
            here = index in stage
        elif (
            index is not None
            or _DRAFT.search(tensor.name)
            or "lm_head" in tensor.name
            or (tensor.name.endswith("norm.weight"))
        ):
            here = last
        else:
            here = number == 0 or (last and sharding.tied and "embed" in tensor.name)
        if here:
            yield tensor


def _index(tensor: Tensor) -> int | None:
    """Return the index of a layer of the language model."""
    match = None if _VISION.search(tensor.name) else _LAYER.search(tensor.name)
    return None if match is None else int(match.group(1))


def _share(tensor: Tensor, sharding: Sharding) -> Bytes:
    size, name = tensor.loaded_bytes(sharding.model_bytes), tensor.name
    if _VISION.search(name):
        return Bytes(size // sharding.tp, size)  # cut or whole, by the class and by mm-encoder-tp-mode
    if _EXPERT.search(name):
        # Over the ranks of TP and DP: without EP every expert is cut, with it each rank has some of them whole.
        return _exactly(-(-size // (sharding.tp * sharding.dp)))
    if _WHOLE.search(name):
        return _exactly(size)
    if _KEYS_AND_VALUES.search(name):
        return _exactly(size // min(sharding.tp, max(1, sharding.kv_heads)))
    if _CUT.search(name):
        return _exactly(size // sharding.tp)
    return Bytes(size // sharding.tp, size)


def _exactly(size: int) -> Bytes:
    return Bytes(size, size)
