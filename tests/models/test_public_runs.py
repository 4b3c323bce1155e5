"""What is computed for public GPU runs is what docs/plan.md shows beside their logs."""

from __future__ import annotations

from typing import Any

import pytest

from pdserve.models.kv_cache import KvFlags, kv_cache
from pdserve.models.layers import layers_of
from tests.docs.markdown import REPOSITORY, Page

GIB = 1 << 30
ERROR = 0.012
"""The largest, of Qwen3-235B."""
_QWEN3_5: dict[str, Any] = {
    "full_attention_interval": 4, "head_dim": 256, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
    "linear_num_key_heads": 16, "linear_value_head_dim": 128, "mamba_ssm_dtype": "float32",
}  # fmt: skip
_LITE: dict[str, Any] = {
    "model_type": "deepseek_v2", "num_hidden_layers": 27, "hidden_size": 2048, "num_attention_heads": 16,
    "num_key_value_heads": 16, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "Llama-3.1-8B": {
        "model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "Qwen3-235B-A22B-FP8": {
        "model_type": "qwen3_moe", "num_hidden_layers": 94, "hidden_size": 4096, "num_attention_heads": 64,
        "num_key_value_heads": 4, "head_dim": 128,
    },
    "DeepSeek-V2-Lite": _LITE,
    "DeepSeek-V2-Lite-Chat": _LITE,
    "Qwen3.6-35B-A3B": {
        **_QWEN3_5, "model_type": "qwen3_5_moe_text", "num_hidden_layers": 40, "hidden_size": 2048,
        "num_attention_heads": 16, "num_key_value_heads": 2, "linear_num_value_heads": 32,
    },
    "Qwen3.8-27B-FP8": {
        **_QWEN3_5, "model_type": "qwen3_5_text", "num_hidden_layers": 64, "hidden_size": 5120,
        "num_attention_heads": 24, "num_key_value_heads": 4, "linear_num_value_heads": 48,
    },
}  # fmt: skip
"""The keys that decide KV, of the public config.json."""
FLAGS: tuple[dict[str, Any], ...] = (
    {"model_len": 20000}, {"model_len": 29000}, {"model_len": 40960, "tp": 4},
    {"model_len": 1024, "tp": 2, "pp": 2}, {"model_len": 32768}, {"model_len": 131072, "cache_dtype": "fp8"},
    {"model_len": 131072, "cache_dtype": "fp8_e4m3", "tp": 2},
)  # fmt: skip
"""Of each run of the page."""


def computed(model: str, flags: dict[str, Any], kv_gib: float, unit: str) -> float:
    cache = kv_cache(layers_of(CONFIGS[model]), KvFlags(block_size=16, kernel_block=16, **flags))
    blocks = cache.blocks(int(kv_gib * GIB))
    if unit == "GiB for one request":
        return round(cache.blocks_a_request * cache.block_bytes / GIB, 2)
    return blocks if unit == "blocks" else cache.tokens(blocks)


def test_the_page_shows_what_is_computed_for_each_log() -> None:
    rows = Page(REPOSITORY / "docs" / "plan.md").table("log")
    for (_, model, _, kv_gib, held, shown, error), flags in zip(rows, FLAGS, strict=True):
        number, _, unit = held.partition(" ")
        log, ours = float(number.replace(",", "")), computed(model, flags, float(kv_gib), unit)
        assert float(shown.replace(",", "")) == ours == pytest.approx(log, rel=ERROR), model
        assert error == f"{(ours - log) / log:+.2%}".replace("%", " %")
