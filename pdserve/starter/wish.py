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

_POSITIONS = "max_position_embeddings"


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
        length = text_config(self.config).get(_POSITIONS) or self.config.get(_POSITIONS)
        return length if isinstance(length, int) and length > 0 else None

    @property
    def length(self) -> int | None:
        """max-model-len; None: left to vLLM. A model whose config.json has none gets the longest: without a length
        nothing can be planned."""
        if self.config is None:
            return None
        return self.longest if self.model_length is None else min(self.model_length, self.longest)

    @property
    def length_reason(self) -> str:
        """Of max-model-len."""
        limit = f"{LONGEST[self.goal]} for --goal {self.goal}"
        fits = "" if self.longest == LONGEST[self.goal] else f", halved to {self.longest} until it fits"
        if self.model_length is None:
            return f"NOT CHECKED: config.json has no {_POSITIONS}; {limit}{fits}"
        return f"the model's {self.model_length}, at most {limit}{fits}"

    @property
    def heads(self) -> int | None:
        """Attention heads, which tensor parallelism deals out; None: not known."""
        if self.config is None:
            return None
        heads = text_config(self.config).get("num_attention_heads")
        return heads if isinstance(heads, int) and heads > 0 else None
