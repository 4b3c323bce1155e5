"""Weights that vLLM quantizes while it loads them: they take less than the checkpoint, and by how much is a range.

What is known is vLLM 0.32's online quantization (config/quantization.py, layers/quantization/online/base.py): the
matrices of linear layers and experts get the bits of the method, and embeddings and the output layer stay as they are.
Which layers are left out depends on the method, on quantization-config and on the model's class. So the weights take
what the checkpoint has at most, and all their matrices at the bits of the method at least.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pdserve.models.quantization import is_quantized
from pdserve.models.weights import BITS, Tensor

_BITS: Mapping[str, int] = {
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
    """Of the matrices that are quantized on the way; None: weights are loaded as they are stored."""
    method = args.get("quantization")
    if args.get("quantization-config") is not None:
        return _BITS["online"]  # beside a quantized checkpoint too, for what that leaves out
    if method is None or method in _STORED or is_quantized(config):
        return None
    return _BITS.get(str(method), _UNKNOWN_BITS)


def at_least(tensors: tuple[Tensor, ...], bits: int) -> tuple[Tensor, ...]:
    """The tensors with every matrix at so many bits."""
    return tuple(_quantized(tensor, bits) for tensor in tensors)


def assumption(args: Mapping[str, Any], bits: int) -> str:
    """What a reader has to know of the range."""
    method = args.get("quantization") or "quantization-config"
    return (
        f"weights between all matrices at {bits} bits and as they are stored: vLLM quantizes them while it loads them "
        f"({method}), and which layers it leaves out is not known here"
    )


def _quantized(tensor: Tensor, bits: int) -> Tensor:
    if len(tensor.shape) < 2 or BITS[tensor.dtype] <= bits or BITS[tensor.dtype] < 16 or _KEPT.search(tensor.name):
        return tensor
    return replace(tensor, dtype=_TYPES[bits])
