"""Weights of a rank: what is cut, dealt out, held whole or not loaded."""

from __future__ import annotations

from dataclasses import replace

from pdserve.models.weights import Bytes, Sharding, Tensor, loaded_tensors, rank_weights
from tests.tables import each_row

SHARDING = Sharding(layers=4, kv_heads=2)
LAYER = "model.layers.0"


def of_rank(name: str, sharding: Sharding, *, dtype: str = "BF16") -> tuple[int, int]:
    held = rank_weights([Tensor(name, dtype, (64, 64))], sharding)
    return held.low, held.high


@each_row("name, parts", [
    (f"{LAYER}.self_attn.q_proj.weight", 8), (f"{LAYER}.self_attn.k_proj.weight", 2),
    (f"{LAYER}.self_attn.kv_b_proj.weight", 8),
    (f"{LAYER}.self_attn.q_a_proj.weight", 1),
    (f"{LAYER}.self_attn.kv_a_proj_with_mqa.weight", 1),
    (f"{LAYER}.mlp.gate.weight", 1), (f"{LAYER}.mlp.gate_proj.weight", 8),
    (f"{LAYER}.mlp.shared_experts.up_proj.weight", 8),
    (f"{LAYER}.input_layernorm.weight", 1),
    (f"{LAYER}.linear_attn.in_proj_qkvz.weight", 8),
    ("model.embed_tokens.weight", 8), ("lm_head.weight", 8),
])  # fmt: skip
def test_tensors_over_eight_tp_ranks(name: str, parts: int) -> None:
    assert of_rank(name, replace(SHARDING, tp=8)) == (8192 // parts, 8192 // parts)


def test_experts_are_spread_over_the_ranks_of_tp_and_dp() -> None:
    """With expert parallelism and without: whole experts dealt out, or every expert cut."""
    expert = f"{LAYER}.mlp.experts.3.up_proj.weight"
    assert of_rank(expert, replace(SHARDING, tp=4, dp=2)) == (1024, 1024)
    assert of_rank(f"{LAYER}.self_attn.q_proj.weight", replace(SHARDING, tp=4, dp=2)) == (2048, 2048)


@each_row("name", [f"{LAYER}.self_attn.mystery.weight", "visual.blocks.0.attn.qkv.weight"])
def test_what_is_not_known_to_be_cut_is_a_range(name: str) -> None:
    assert of_rank(name, replace(SHARDING, tp=4)) == (2048, 8192)
    assert of_rank(name, SHARDING) == (8192, 8192)


@each_row("dtype, size", [("BF16", 8192), ("F8_E4M3", 4096), ("U8", 4096), ("I32", 16384), ("F32", 8192), ("F4", 2048)])
def test_types(dtype: str, size: int) -> None:
    """Weights of 32 bits are loaded as the model's own type."""
    assert of_rank(f"{LAYER}.mlp.up_proj.weight", SHARDING, dtype=dtype) == (size, size)


def test_scales_of_32_bits_stay() -> None:
    assert of_rank(f"{LAYER}.mlp.up_proj.weight_scale_inv", SHARDING, dtype="F32") == (16384, 16384)


@each_row("name", ["model.layers.4.mlp.up_proj.weight", "mtp.layers.0.mlp.up_proj.weight"])
def test_mtp_modules_are_loaded_only_for_drafts(name: str) -> None:
    tensor = Tensor(name, "BF16", (64, 64))
    assert not list(loaded_tensors([tensor], SHARDING))
    assert list(loaded_tensors([tensor], replace(SHARDING, drafts=True))) == [tensor]


def test_pipeline_stages_hold_their_layers_and_the_ends() -> None:
    tensors = [Tensor(f"model.layers.{index}.mlp.up_proj.weight", "BF16", (64, 64)) for index in range(4)]
    tensors += [Tensor("model.embed_tokens.weight", "BF16", (640, 64)), Tensor("model.norm.weight", "BF16", (64,))]
    assert rank_weights(tensors, replace(SHARDING, pp=2)) == Bytes(98304, 98304)
    tied = rank_weights(tensors, replace(SHARDING, pp=2, tied=True))
    assert tied.high == 98304 + 128, "a tied embedding is on the last stage too"


def test_a_tied_output_layer_is_not_held_twice() -> None:
    assert of_rank("lm_head.weight", replace(SHARDING, tied=True)) == (0, 0)
