"""config.json of tiny models, for each way in which models keep KV, with the flags that they are served with."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

_COMMON: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2,
    "vocab_size": 512, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "torch_dtype": "bfloat16",
    "hidden_act": "silu", "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1,
}  # fmt: skip


@dataclass(frozen=True)
class Tiny:
    """A model, its flags, and for how much KV memory its blocks are counted."""

    name: str
    config: dict[str, Any]
    args: dict[str, Any] = field(default_factory=dict)
    kv_bytes: int = 256 << 20
    tp: int = 1
    pp: int = 1


def _tiny(name: str, architecture: str, model_type: str, *, args: dict[str, Any] | None = None, **config: Any) -> Tiny:
    whole = {**_COMMON, "architectures": [architecture], "model_type": model_type, "num_hidden_layers": 4, **config}
    return Tiny(name, whole, {"max-model-len": 8192, "max-num-batched-tokens": 2048, **(args or {})})


_LLAMA: dict[str, Any] = {"architecture": "LlamaForCausalLM", "model_type": "llama"}
_MLA: dict[str, Any] = {
    "kv_lora_rank": 64, "q_lora_rank": None, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32,
    "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "topk_method": "greedy", "scoring_func": "softmax",
    "norm_topk_prob": True, "routed_scaling_factor": 1.0, "num_key_value_heads": 8,
}  # fmt: skip
_GRANITE: dict[str, Any] = {
    "mamba_n_heads": 16, "mamba_d_head": 32, "mamba_n_groups": 1, "mamba_d_state": 64, "mamba_d_conv": 4,
    "mamba_expand": 2, "mamba_chunk_size": 256, "mamba_conv_bias": True, "mamba_proj_bias": False,
    "num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": 512,
    "position_embedding_type": "rope", "rope_theta": 10000.0, "attention_bias": False, "attention_dropout": 0.0,
    "attention_multiplier": 0.2, "embedding_multiplier": 1.0, "residual_multiplier": 1.0, "logits_scaling": 1.0,
    "num_hidden_layers": 8,
    "layer_types": ["mamba", "mamba", "mamba", "attention"] * 2,
}  # fmt: skip
_GDN: dict[str, Any] = {
    "head_dim": 64, "num_hidden_layers": 8, "full_attention_interval": 4, "linear_num_key_heads": 4,
    "linear_num_value_heads": 8, "linear_key_head_dim": 32, "linear_value_head_dim": 32, "linear_conv_kernel_dim": 4,
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True, "partial_rotary_factor": 0.25,
    "rope_theta": 10000.0,
}  # fmt: skip
_JAMBA: dict[str, Any] = {
    "attn_layer_period": 4, "attn_layer_offset": 2, "expert_layer_period": 2, "expert_layer_offset": 1,
    "num_experts": 1, "num_experts_per_tok": 1, "num_hidden_layers": 8, "mamba_expand": 2, "mamba_d_state": 16,
    "mamba_d_conv": 4, "mamba_dt_rank": 16, "mamba_conv_bias": True, "mamba_proj_bias": False,
    "use_mamba_kernels": False,
}  # fmt: skip
_NEMOTRON: dict[str, Any] = {
    "hybrid_override_pattern": "M-M*M-M*", "num_hidden_layers": 8, "mamba_num_heads": 16, "mamba_head_dim": 32,
    "n_groups": 2, "ssm_state_size": 64, "conv_kernel": 4, "head_dim": 32, "expand": 2, "chunk_size": 128,
    "mlp_hidden_act": "relu2", "layer_norm_epsilon": 1e-5, "mlp_bias": False, "use_bias": False,
    "use_conv_bias": True, "mamba_hidden_act": "silu", "mamba_proj_bias": False, "attention_bias": False,
    "residual_in_fp32": False,
}  # fmt: skip
_GEMMA3: dict[str, Any] = {
    "head_dim": 32, "sliding_window": 512,
    "layer_types": [*["sliding_attention"] * 5, "full_attention"] * 2,
    "num_hidden_layers": 12, "query_pre_attn_scalar": 32, "hidden_activation": "gelu_pytorch_tanh",
    "rope_theta": 10000.0, "rope_local_base_freq": 10000.0,
}  # fmt: skip
_QWEN3_MOE: dict[str, Any] = {
    "head_dim": 64, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "decoder_sparse_step": 1,
    "mlp_only_layers": [], "norm_topk_prob": True, "rope_theta": 10000.0,
}  # fmt: skip

_SINGLE_RANK = (
    _tiny("llama", **_LLAMA),
    _tiny("llama-mha", **_LLAMA, num_key_value_heads=8, num_hidden_layers=3),
    _tiny("llama-fp8-kv", **_LLAMA, args={"kv-cache-dtype": "fp8"}),
    _tiny("llama-block-64", **_LLAMA, args={"block-size": 64, "max-model-len": 5000}),
    _tiny("qwen3", "Qwen3ForCausalLM", "qwen3", head_dim=64, rope_theta=10000.0),
    _tiny("deepseek-mla", "DeepseekV2ForCausalLM", "deepseek_v2", **_MLA),
    _tiny("mistral-window", "MistralForCausalLM", "mistral", sliding_window=1024),
    _tiny("gemma3-windows", "Gemma3ForCausalLM", "gemma3_text", **_GEMMA3),
    _tiny(
        "gemma3-uneven", "Gemma3ForCausalLM", "gemma3_text",
        **{
            **_GEMMA3, "num_hidden_layers": 7,
            "layer_types": [*["sliding_attention"] * 5, "full_attention"] * 1 + ["sliding_attention"],
        },
    ),
    _tiny("granite-mamba2", "GraniteMoeHybridForCausalLM", "granitemoehybrid", **_GRANITE),
    _tiny("nemotron-mamba2", "NemotronHForCausalLM", "nemotron_h", **_NEMOTRON),
    _tiny("jamba-mamba1", "JambaForCausalLM", "jamba", **_JAMBA),
    _tiny("qwen3-next-gdn", "Qwen3NextForCausalLM", "qwen3_next", **_GDN),
    _tiny("qwen3-next-no-cache", "Qwen3NextForCausalLM", "qwen3_next", **_GDN, args={"enable-prefix-caching": False}),
    *(
        _tiny(
            f"qwen3-next-mtp-{drafted}", "Qwen3NextForCausalLM", "qwen3_next",
            **{**_GDN, "num_nextn_predict_layers": 1},
            args={"speculative-config": {"method": "mtp", "num_speculative_tokens": drafted}},
        )
        for drafted in (1, 2)
    ),
    _tiny(
        "deepseek-mtp", "DeepseekV3ForCausalLM", "deepseek_v3", **{**_MLA, "num_nextn_predict_layers": 1},
        args={"speculative-config": {"method": "mtp", "num_speculative_tokens": 1}},
    ),
    _tiny("qwen3-moe", "Qwen3MoeForCausalLM", "qwen3_moe", **_QWEN3_MOE),
)  # fmt: skip
_BY_NAME = {tiny.name: tiny for tiny in _SINGLE_RANK}
_TP = ("llama", "qwen3", "deepseek-mla", "gemma3-windows", "granite-mamba2", "nemotron-mamba2", "jamba-mamba1")

TINY = (
    *_SINGLE_RANK,
    *(replace(_BY_NAME[name], name=f"{name}-tp2", tp=2) for name in (*_TP, "qwen3-next-gdn")),
    *(replace(_BY_NAME[name], name=f"{name}-tp4", tp=4) for name in ("llama", "granite-mamba2")),
    *(replace(_BY_NAME[name], name=f"{name}-pp2", pp=2) for name in ("llama-mha", "gemma3-uneven", "granite-mamba2")),
)
"""On several ranks, too: more of them than heads of KV, and stages of unequal numbers of layers."""
