"""What a first recipe is made from: the words of the user, and what is known of the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pdserve.models.layers import text_config
from pdserve.models.weights import Tensor
from pdserve.starter.goal import Goal
from pdserve.starter.hardware import Hardware

LONGEST: Mapping[Goal, int] = {Goal.THROUGHPUT: 32768, Goal.LATENCY: 32768, Goal.AGENTS: 131072}
"""Tokens of a request that a first recipe serves, where the model can do more."""


@dataclass(frozen=True)
class InitChoice:
    """`config`, `tensors`: None where they are not on this machine."""

    name: str
    """The end of the model's path or id."""
    path: str | None
    """An absolute folder; None: `id` is of the hub."""
    id: str | None
    hardware: Hardware
    nodes: int
    devices: int
    """Of each node; 0 on a CPU."""
    goal: Goal
    longest: int
    """max-model-len is no more."""
    config: Mapping[str, Any] | None
    tensors: tuple[Tensor, ...] | None

    @property
    def model_length(self) -> int | None:
        """The longest request that the model can serve; None: not known."""
        if self.config is None:
            return None
        length = text_config(self.config).get("max_position_embeddings")
        return length if isinstance(length, int) and length > 0 else None

    @property
    def length(self) -> int | None:
        """max-model-len; None: left to vLLM."""
        return None if self.model_length is None else min(self.model_length, self.longest)

    @property
    def heads(self) -> int | None:
        """Attention heads, which tensor parallelism deals out; None: not known."""
        if self.config is None:
            return None
        heads = text_config(self.config).get("num_attention_heads")
        return heads if isinstance(heads, int) and heads > 0 else None
