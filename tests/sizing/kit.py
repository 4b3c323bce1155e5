"""Sizings of a model with round numbers: a token takes 4 KiB on a rank, a block of 128 tokens 512 KiB."""

from __future__ import annotations

from typing import Any

from pdserve.plan.build import build_plan
from pdserve.plan.placement import nodes_for
from pdserve.sizing import Sizing, SizingOptions, size_recipe
from tests.plan.kit import VERSIONS, recipe

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 4, "hidden_size": 512,
    "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 4096, "torch_dtype": "bfloat16",
}  # fmt: skip
HYBRID: dict[str, Any] = {
    **CONFIG, "model_type": "qwen3_next", "num_hidden_layers": 4, "full_attention_interval": 2,
    "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 64, "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
}  # fmt: skip
KV_OF_A_GIB = {"engine": {"env": {"VLLM_CPU_KVCACHE_SPACE": 1}}}


def sizing(*changes: dict[str, Any], config: dict[str, Any] | None = None, **given: Any) -> Sizing:
    """Of 1P1D on a CPU with 1 GiB of KV each, and the changes."""
    made = recipe(KV_OF_A_GIB, *changes)
    plan = build_plan(made, nodes_for(made), run_dir=".", run_id="r", versions=VERSIONS)
    return size_recipe(made, plan, config or CONFIG, None, 0, SizingOptions(**given))


def where(made: Sizing) -> list[tuple[str, str]]:
    """Severity and key of each edge that is crossed."""
    return [(crossing.severity, crossing.where) for crossing in made.crossings]
