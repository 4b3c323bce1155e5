"""Public logs of GPU runs: what they state, the model's public config.json, and what pdserve computes of it.

Each number of a log is copied from the thread that is named. Configs hold the keys that decide KV and weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from pdserve.models.kv_cache import KvFlags, kv_cache
from pdserve.models.layers import layers_of
from pdserve.models.weights import Sharding, Tensor, rank_weights

GIB = 1 << 30

LLAMA_8B: dict[str, Any] = {
    "model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 14336,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
}  # fmt: skip
LLAMA_70B = {
    **LLAMA_8B, "num_hidden_layers": 80, "hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64,
}  # fmt: skip
QWEN2_14B: dict[str, Any] = {
    "model_type": "qwen2", "num_hidden_layers": 48, "hidden_size": 5120, "intermediate_size": 13824,
    "num_attention_heads": 40, "num_key_value_heads": 8, "vocab_size": 152064,
}  # fmt: skip
QWEN3_30B_A3B: dict[str, Any] = {
    "model_type": "qwen3_moe", "num_hidden_layers": 48, "hidden_size": 2048, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "moe_intermediate_size": 768, "vocab_size": 151936,
}  # fmt: skip
QWEN3_235B: dict[str, Any] = {
    "model_type": "qwen3_moe", "num_hidden_layers": 94, "hidden_size": 4096, "num_attention_heads": 64,
    "num_key_value_heads": 4, "head_dim": 128,
}  # fmt: skip
DEEPSEEK_V2_LITE: dict[str, Any] = {
    "model_type": "deepseek_v2", "num_hidden_layers": 27, "hidden_size": 2048, "num_attention_heads": 16,
    "num_key_value_heads": 16, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
}  # fmt: skip
_QWEN3_5: dict[str, Any] = {
    "full_attention_interval": 4, "head_dim": 256, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
    "linear_num_key_heads": 16, "linear_value_head_dim": 128, "mamba_ssm_dtype": "float32",
}  # fmt: skip
QWEN3_6_35B_A3B: dict[str, Any] = {
    **_QWEN3_5, "model_type": "qwen3_5_moe_text", "num_hidden_layers": 40, "hidden_size": 2048,
    "num_attention_heads": 16, "num_key_value_heads": 2, "linear_num_value_heads": 32,
}  # fmt: skip
QWEN3_8_27B: dict[str, Any] = {
    **_QWEN3_5, "model_type": "qwen3_5_text", "num_hidden_layers": 64, "hidden_size": 5120, "num_attention_heads": 24,
    "num_key_value_heads": 4, "linear_num_value_heads": 48,
}  # fmt: skip


@dataclass(frozen=True)
class KvRun:
    """A log with memory for KV and what it held. `unit`: of `held`."""

    source: str
    model: str
    config: dict[str, Any]
    hardware: str
    kv_gib: float
    held: float
    unit: str
    flags: dict[str, Any] = field(default_factory=dict)

    def computed(self) -> float:
        cache = kv_cache(layers_of(self.config), KvFlags(**{"block_size": 16, "kernel_block": 16, **self.flags}))
        blocks = cache.blocks(int(self.kv_gib * GIB))
        if self.unit == "blocks":
            return blocks
        if self.unit == "GiB for one request":
            return round(cache.blocks_a_request * cache.block_bytes / GIB, 2)
        return cache.tokens(blocks)


KV_RUNS = (
    KvRun("vllm#10517", "Llama-3.1-8B", LLAMA_8B, "RTX 3090", 3.81, 1952, "blocks", {"model_len": 20000}),
    KvRun("vllm#10517", "Llama-3.1-8B", LLAMA_8B, "RTX 3090", 2.89, 1478, "blocks", {"model_len": 29000}),
    KvRun(
        "vllm#21348", "Qwen3-235B-A22B-FP8", QWEN3_235B, "4 H100, TP 4", 8.11, 178_880, "tokens",
        {"model_len": 40960, "tp": 4},
    ),
    KvRun(
        "vllm#20665", "DeepSeek-V2-Lite", DEEPSEEK_V2_LITE, "4 L4, PP 2", 12.13, 807_792, "tokens",
        {"model_len": 1024, "tp": 2, "pp": 2},
    ),
    KvRun(
        "vllm#15871", "DeepSeek-V2-Lite-Chat", DEEPSEEK_V2_LITE, "2 GPUs", 0.93, 0.95, "GiB for one request",
        {"model_len": 32768},
    ),
    KvRun(
        "club-3090#652", "Qwen3.6-35B-A3B", QWEN3_6_35B_A3B, "RTX 5090", 6.01, 569_878, "tokens",
        {"model_len": 131072, "cache_dtype": "fp8"},
    ),
    KvRun(
        "talos-argocd-proxmox#1995", "Qwen3.8-27B-FP8", QWEN3_8_27B, "2 RTX 3090, TP 2", 4.99, 302_921, "tokens",
        {"model_len": 131072, "cache_dtype": "fp8_e4m3", "tp": 2},
    ),
)  # fmt: skip


@dataclass(frozen=True)
class WeightRun:
    """A log with the memory that a rank's weights took."""

    source: str
    model: str
    config: dict[str, Any]
    held_gib: float
    tp: int = 1
    linear: str = "BF16"
    """Type of the layers that are quantised."""
    biased: bool = False

    def computed(self) -> float:
        config = self.config
        sharding = Sharding(config["num_hidden_layers"], config["num_key_value_heads"], tp=self.tp)
        held = rank_weights(list(tensors_of(config, self.linear, biased=self.biased)), sharding)
        assert held.low == held.high
        return round(held.high / GIB, 4)


WEIGHT_RUNS = (
    WeightRun("vllm#10517", "Llama-3.1-8B-Instruct", LLAMA_8B, 14.9888),
    WeightRun("vllm#13061", "DeepSeek-R1-Distill-Qwen-14B", QWEN2_14B, 13.9476, tp=2, biased=True),
    WeightRun("vllm#17469", "Qwen3-30B-A3B", QWEN3_30B_A3B, 14.2474, tp=4),
    WeightRun("vllm#12569", "Meta-Llama-3.1-70B-Instruct-quantized.w8a8", LLAMA_70B, 67.7229, linear="I8"),
)


def tensors_of(config: dict[str, Any], linear: str, *, biased: bool) -> Iterator[Tensor]:
    """The checkpoint of a model of these families, as its classes name and shape it."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    size = config.get("head_dim") or hidden // heads
    rows = {"q": heads * size, "k": config["num_key_value_heads"] * size, "v": config["num_key_value_heads"] * size}
    yield Tensor("model.embed_tokens.weight", "BF16", (config["vocab_size"], hidden))
    yield Tensor("lm_head.weight", "BF16", (config["vocab_size"], hidden))
    yield Tensor("model.norm.weight", "BF16", (hidden,))
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        yield Tensor(f"{layer}.input_layernorm.weight", "BF16", (hidden,))
        yield Tensor(f"{layer}.post_attention_layernorm.weight", "BF16", (hidden,))
        for name, out in rows.items():
            yield from _linear(f"{layer}.self_attn.{name}_proj", linear, out, hidden)
            if biased:
                yield Tensor(f"{layer}.self_attn.{name}_proj.bias", "BF16", (out,))
        yield from _linear(f"{layer}.self_attn.o_proj", linear, hidden, heads * size)
        blocks: list[tuple[str, int]] = [(f"{layer}.mlp", config.get("intermediate_size", 0))]
        if experts := config.get("num_experts"):
            yield Tensor(f"{layer}.mlp.gate.weight", "BF16", (experts, hidden))
            blocks = [(f"{layer}.mlp.experts.{e}", config["moe_intermediate_size"]) for e in range(experts)]
        for name, inner in blocks:
            yield from _linear(f"{name}.gate_proj", linear, inner, hidden)
            yield from _linear(f"{name}.up_proj", linear, inner, hidden)
            yield from _linear(f"{name}.down_proj", linear, hidden, inner)


def _linear(name: str, dtype: str, out: int, into: int) -> Iterator[Tensor]:
    yield Tensor(f"{name}.weight", dtype, (out, into))
    if dtype == "I8":
        yield Tensor(f"{name}.weight_scale", "BF16", (out, 1))


def error(computed: float, held: float) -> str:
    """Signed, in per cent of what the log has."""
    return f"{(computed - held) / held:+.2%}".replace("%", " %")
