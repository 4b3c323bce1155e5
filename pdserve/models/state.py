"""Recurrent state of one layer: what vLLM's MambaStateShapeCalculator (0.32) makes of a config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_MAMBA2 = frozenset({"granitemoehybrid", "bamba", "nemotron_h"})
_LARGEST = 1 << 40
_GATED_DELTA = frozenset({"qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_5", "qwen3_5_moe"})


@dataclass(frozen=True)
class State:
    """A convolution's last inputs, and the state proper."""

    channels: int
    """Of the convolution."""
    group_channels: int
    """Of the convolution for each group; a group that spans ranks is held by each of them."""
    groups: int
    kernel: int
    heads: int
    head_elements: int
    keeps_drafts: bool
    """Whether the convolution keeps the inputs of drafted tokens too."""
    checkpoints: int
    """Blocks that a request holds for states inside its prompt, beside the two of every request."""
    dtype: str | None
    """Of the state proper, as the config.json or the model class asks; None: that of the convolution."""

    def convolution(self, tp: int, drafts: int) -> int:
        """Elements that one rank keeps. `drafts`: tokens that are drafted in a step."""
        extra = 0 if not self.groups or self.groups % tp == 0 else tp - self.groups
        channels = self.channels + self.group_channels * (self.groups + extra)
        return channels // tp * (self.kernel - 1 + (drafts if self.keeps_drafts else 0))

    def recurrent(self, tp: int) -> int:
        """Elements of the state proper that one rank keeps."""
        return self.heads // tp * self.head_elements


def state_of(text: Mapping[str, Any]) -> State | None:
    """The state of a layer of this text config; None: its kind is not known, or a key is missing."""
    model = str(text.get("model_type", ""))
    try:
        return _state(model, text)
    except KeyError:
        return None


def _state(model: str, text: Mapping[str, Any]) -> State | None:
    def of(key: str) -> int:
        """These keys mean other things in other models, so config_json.py leaves them alone."""
        value = text.get(key)
        if type(value) is not int or not 0 < value <= _LARGEST:
            raise KeyError(key)
        return value

    if model == "jamba":
        inner = of("mamba_expand") * of("hidden_size")
        return State(inner, 0, 0, of("mamba_d_conv"), inner, of("mamba_d_state"), False, 0, None)
    if model == "nemotron_h":
        heads, size, state = of("mamba_num_heads"), of("mamba_head_dim"), of("ssm_state_size")
        wanted = text.get("mamba_ssm_cache_dtype", "float32")
        return State(heads * size, 2 * state, of("n_groups"), of("conv_kernel"), heads, size * state, True, 1, wanted)
    if model in _MAMBA2:
        heads, size, state = of("mamba_n_heads"), of("mamba_d_head"), of("mamba_d_state")
        inner = of("mamba_expand") * of("hidden_size")
        groups, kernel = of("mamba_n_groups"), of("mamba_d_conv")
        return State(inner, 2 * state, groups, kernel, heads, size * state, True, 1, None)
    if model in _GATED_DELTA:
        key, value = of("linear_key_head_dim"), of("linear_value_head_dim")
        heads = of("linear_num_value_heads")
        channels = 2 * key * of("linear_num_key_heads") + value * heads
        kernel = of("linear_conv_kernel_dim")
        return State(channels, 0, 0, kernel, heads, value * key, True, 0, text.get("mamba_ssm_dtype"))
    return None
