"""Which layers keep what, by config.json; and which models are refused instead of guessed."""

from __future__ import annotations

from typing import Any

import pytest

from pdserve.models.config_json import UnknownModelError
from pdserve.models.layers import layers_of, text_config
from tests.tables import each_row

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


@each_row("config, heads", [
    ({"model_type": "chatglm", "multi_query_attention": True, "multi_query_group_num": 2}, 2),
    ({"model_type": "chatglm", "multi_query_attention": False, "multi_query_group_num": 2}, 8),
    ({"model_type": "step3p5", "num_attention_groups": 4}, 4),
    ({"model_type": "falcon"}, 1), ({"model_type": "falcon", "multi_query": False}, 8),
    ({"model_type": "falcon", "multi_query": True, "new_decoder_architecture": True, "num_kv_heads": 4}, 4),
    ({"n_head_kv": 4}, 4), ({"num_kv_heads": 4, "num_key_value_heads": 2}, 4), ({}, 8),
])  # fmt: skip
def test_heads_of_kv_by_the_keys_of_other_models(config: dict[str, Any], heads: int) -> None:
    """In the order of vLLM's get_total_num_kv_heads, and as its falcon.py and chatglm.py have it."""
    assert layers_of({**BASE, "num_key_value_heads": None, **config})[0].kv_heads == heads


def test_layers_behind_the_last_one_are_mtp_modules() -> None:
    config = {**BASE, "sliding_window": 64, "layer_types": ["full_attention"] * 4 + ["sliding_attention"]}
    assert keeps(**config) == ["full"] * 4
    with pytest.raises(UnknownModelError, match="MTP modules"):
        layers_of({**config, "num_nextn_predict_layers": 1}, drafts=True)


def test_a_size_of_0_is_one_that_the_model_does_not_have() -> None:
    """DeepSeek-OCR, whose language model keeps K and V."""
    ocr = {"model_type": "deepseek_v2", "kv_lora_rank": None, "qk_rope_head_dim": 0, "v_head_dim": 0, "head_dim": 0}
    layer = layers_of({**BASE, **ocr})[0]
    assert (layer.kv_heads, layer.head_size, layer.value_size) == (2, 64, 64)


def test_the_text_part_of_a_multimodal_model_counts() -> None:
    config = {"model_type": "x", "text_config": BASE, "vision_config": {"num_hidden_layers": 27}}
    assert text_config(config)["num_hidden_layers"] == 4
    assert len(layers_of(config)) == 4


@each_row("config, expected", [
    ({"model_type": "mistral", "sliding_window": 1024}, ["window"] * 4),
    ({"model_type": "qwen2", "sliding_window": 1024, "use_sliding_window": False}, ["full"] * 4),
    ({"model_type": "gemma2", "sliding_window": 1024}, ["window", "full", "window", "full"]),
    ({"model_type": "cohere2", "sliding_window": 1024}, ["window", "window", "window", "full"]),
    ({"sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"] * 2}, ["window", "full"] * 2),
    ({"attention_chunk_size": 128, "model_type": "llama4_text"}, ["chunk", "chunk", "chunk", "full"]),
    ({"attention_chunk_size": 128, "no_rope_layers": [1, 0, 1, 0]}, ["chunk", "full", "chunk", "full"]),
])  # fmt: skip
def test_windows_and_chunks(config: dict[str, Any], expected: list[str]) -> None:
    assert keeps(**config) == expected


def test_mtp_modules_keep_kv_where_the_model_drafts_for_itself() -> None:
    config = {**BASE, "num_nextn_predict_layers": 1}
    assert len(layers_of(config)) == 4
    assert len(layers_of(config, drafts=True)) == 5
    with pytest.raises(UnknownModelError, match="no MTP modules"):
        layers_of(BASE, drafts=True)


@each_row("config, why", [
    ({"num_hidden_layers": None}, "num_hidden_layers"),
    ({"compress_ratios": [4, 128]}, "compress_ratios"),
    ({"kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_topk": 2048}, "index"),
    ({"model_type": "deepseek_v3", "kv_lora_rank": 512}, "qk_rope_head_dim"),
    ({"model_type": "minicpm3", "kv_lora_rank": 256, "qk_rope_head_dim": 32}, "minicpm3"),
    ({"model_type": "nemotron-nas", "block_configs": [{"attention": {"n_heads_in_group": 8}}]}, "block_configs"),
    ({"model_type": "gemma3n_text", "num_kv_shared_layers": 2}, "num_kv_shared_layers"),
    ({"num_attention_groups": 4, "attention_other_setting": {"num_attention_groups": 2}}, "attention_other_setting"),
    ({"layer_types": ["full_attention"] * 3}, "3 layers"),
    ({"model_type": "kimi_linear", "linear_attn_config": {"kda_layers": [1]}}, "kimi_linear"),
    ({"model_type": "falcon_h1"}, "falcon_h1"),
    ({"model_type": "gpt_oss", "sliding_window": 128}, "gpt_oss"),
    ({"model_type": "lfm2", "layer_types": ["conv"] * 4}, "lfm2"),
    ({"layer_types": ["quantum_attention"] * 4}, "quantum_attention"),
    ({"global_head_dim": 512}, "global_head_dim"),
    ({"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 2}, "max_window_layers"),
    ({"model_type": "qwen3_next", "full_attention_interval": 2}, "qwen3_next"),
])  # fmt: skip
def test_what_is_not_known_is_refused_with_its_reason(config: dict[str, Any], why: str) -> None:
    with pytest.raises(UnknownModelError, match=why):
        layers_of({**BASE, **config})
