"""The lines of real config.json files that say which kinds of layers a model has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

FULL, WINDOW, STATE = "full", "window", "recurrent"


@dataclass(frozen=True)
class Family:
    """`architecture`: vLLM's name of its class."""

    architecture: str
    config: dict[str, Any]
    kinds: frozenset[str]


def _family(architecture: str, *kinds: str, **config: Any) -> Family:
    return Family(architecture, config, frozenset(kinds))


FAMILIES = (
    _family("LlamaForCausalLM", FULL, model_type="llama", num_attention_heads=4),
    _family("MistralForCausalLM", WINDOW, model_type="mistral", sliding_window=4096, num_attention_heads=4),
    _family("Qwen2ForCausalLM", FULL, model_type="qwen2", sliding_window=32768, use_sliding_window=False),
    _family("Gemma2ForCausalLM", FULL, WINDOW, model_type="gemma2", sliding_window=4096),
    _family("Gemma3ForCausalLM", FULL, WINDOW, model_type="gemma3_text", sliding_window=512, sliding_window_pattern=6),
    _family(
        "GptOssForCausalLM", FULL, WINDOW, model_type="gpt_oss", sliding_window=128,
        layer_types=["sliding_attention", "full_attention"] * 2,
    ),
    _family("Cohere2ForCausalLM", FULL, WINDOW, model_type="cohere2", sliding_window=4096, sliding_window_pattern=4),
    _family(
        "Llama4ForConditionalGeneration", FULL, WINDOW, model_type="llama4",
        text_config={"model_type": "llama4_text", "attention_chunk_size": 8192, "no_rope_layers": [1, 1, 1, 0]},
    ),
    _family("JambaForCausalLM", FULL, STATE, model_type="jamba", attn_layer_period=8, mamba_d_state=16),
    _family("MambaForCausalLM", STATE, model_type="mamba", state_size=16),
    _family("FalconH1ForCausalLM", FULL, STATE, model_type="falcon_h1", mamba_d_ssm=1024, num_attention_heads=8),
    _family("NemotronHForCausalLM", FULL, STATE, model_type="nemotron_h", hybrid_override_pattern="M-M*-M-"),
    _family(
        "GraniteMoeHybridForCausalLM", FULL, STATE, model_type="granitemoehybrid",
        layer_types=["mamba", "attention", "mamba"],
    ),
    _family("Qwen3NextForCausalLM", FULL, STATE, model_type="qwen3_next", full_attention_interval=4),
    _family(
        "Qwen3_5ForConditionalGeneration", FULL, STATE, model_type="qwen3_5",
        text_config={"layer_types": ["linear_attention"] * 3 + ["full_attention"]},
    ),
    _family(
        "KimiLinearForCausalLM", FULL, STATE, model_type="kimi_linear",
        linear_attn_config={"kda_layers": [1, 2, 3], "full_attn_layers": [4]},
    ),
    _family("MiniMaxText01ForCausalLM", FULL, STATE, model_type="minimax_text_01", attn_type_list=[0, 0, 1]),
    _family("Lfm2ForCausalLM", FULL, STATE, model_type="lfm2", layer_types=["conv", "full_attention"]),
    _family("Zamba2ForCausalLM", FULL, STATE, model_type="zamba2", layers_block_type=["mamba", "hybrid"]),
    _family("DeepseekV4ForCausalLM", "compressed", model_type="deepseek_v4", compress_ratios=[1, 4, 128]),
)  # fmt: skip
