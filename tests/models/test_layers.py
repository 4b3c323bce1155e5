"""Which layers keep what, by config.json; and which models are refused instead of guessed."""

from __future__ import annotations

from typing import Any

import pytest

from pdserve.models.layers import UnknownModelError, layers_of, text_config

BASE: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}


def keeps(**config: Any) -> list[str]:
    return [layer.keeps for layer in layers_of({**BASE, **config})]


def test_heads_and_their_size() -> None:
    layer = layers_of(BASE)[0]
    assert (layer.kv_heads, layer.head_size, layer.value_size) == (2, 64, 64)
    assert layers_of({**BASE, "head_dim": 128})[0].head_size == 128
    assert layers_of({key: BASE[key] for key in BASE if key != "num_key_value_heads"})[0].kv_heads == 8


def test_the_text_part_of_a_multimodal_model_counts() -> None:
    config = {"model_type": "x", "text_config": BASE, "vision_config": {"num_hidden_layers": 27}}
    assert text_config(config)["num_hidden_layers"] == 4
    assert len(layers_of(config)) == 4


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"model_type": "mistral", "sliding_window": 1024}, ["window"] * 4),
        ({"model_type": "qwen2", "sliding_window": 1024, "use_sliding_window": False}, ["full"] * 4),
        ({"model_type": "gemma2", "sliding_window": 1024}, ["window", "full", "window", "full"]),
        ({"model_type": "cohere2", "sliding_window": 1024}, ["window", "window", "window", "full"]),
        ({"sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"] * 2}, ["window", "full"] * 2),
        ({"attention_chunk_size": 128, "model_type": "llama4_text"}, ["chunk", "chunk", "chunk", "full"]),
        ({"attention_chunk_size": 128, "no_rope_layers": [1, 0, 1, 0]}, ["chunk", "full", "chunk", "full"]),
    ],
)
def test_windows_and_chunks(config: dict[str, Any], expected: list[str]) -> None:
    assert keeps(**config) == expected


def test_a_layer_without_kv_is_none_of_them() -> None:
    config = {**BASE, "model_type": "nemotron_h", "hybrid_override_pattern": "*-*-"}
    assert [layer.index for layer in layers_of(config)] == [0, 2]


def test_mtp_modules_keep_kv_where_the_model_drafts_for_itself() -> None:
    config = {**BASE, "num_nextn_predict_layers": 1}
    assert len(layers_of(config)) == 4
    assert len(layers_of(config, drafts=True)) == 5
    with pytest.raises(UnknownModelError, match="no MTP modules"):
        layers_of(BASE, drafts=True)


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"num_hidden_layers": "4"}, "num_hidden_layers"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"compress_ratios": [4, 128]}, "compress_ratios"),
        ({"kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_topk": 2048}, "index"),
        ({"kv_lora_rank": 512}, "qk_rope_head_dim"),
        ({"model_type": "kimi_linear", "linear_attn_config": {"kda_layers": [1]}}, "kimi_linear"),
        ({"model_type": "falcon_h1"}, "falcon_h1"),
        ({"model_type": "gpt_oss", "sliding_window": 128}, "gpt_oss"),
        ({"model_type": "lfm2", "layer_types": ["conv"] * 4}, "lfm2"),
        ({"layer_types": ["quantum_attention"] * 4}, "quantum_attention"),
        ({"layer_types": ["hybrid"] * 4}, "hybrid"),
        ({"global_head_dim": 512}, "global_head_dim"),
        ({"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 2}, "max_window_layers"),
        ({"model_type": "qwen3_next", "full_attention_interval": 2}, "qwen3_next"),
    ],
)
def test_what_is_not_known_is_refused_with_its_reason(config: dict[str, Any], why: str) -> None:
    with pytest.raises(UnknownModelError, match=why):
        layers_of({**BASE, **config})
