"""The numbers of a whole recipe: exact where all is stated, else a range, or nothing."""

from __future__ import annotations

from typing import Any

import pytest

from pdserve.errors import RecipeError
from pdserve.models.config_json import UnknownModelError
from pdserve.models.weights import Tensor
from pdserve.plan.build import build_plan
from pdserve.plan.placement import nodes_for
from pdserve.sizing import BESIDE_KV_GIB, GIB, Sizing, SizingOptions, Span, quantized_bits, size_recipe
from tests.plan.kit import NIXL, VERSIONS, on_gpus, recipe, with_lmcache
from tests.sizing.kit import CONFIG, HYBRID, sizing, where
from tests.tables import each_row

MLA = {**CONFIG, "model_type": "deepseek_v3", "kv_lora_rank": 512, "qk_rope_head_dim": 64}


def test_nothing_is_made_up_without_memory() -> None:
    prefill = sizing(on_gpus()).roles[0]
    assert (prefill.kv_bytes, prefill.blocks, prefill.requests) == (None, None, None)


def test_memory_of_a_device_gives_a_range() -> None:
    made = recipe(on_gpus(), {"engine": {"args": {"gpu-memory-utilization": 0.5}}})
    plan = build_plan(made, nodes_for(made), run_dir=".", run_id="r", versions=VERSIONS)
    weights = (Tensor("model.embed_tokens.weight", "BF16", (1 << 20, 512)),)
    prefill = size_recipe(made, plan, CONFIG, weights, 0, SizingOptions(device_gib=80)).roles[0]
    assert prefill.weights_bytes is not None
    assert prefill.weights_bytes.exact
    assert prefill.kv_bytes is not None
    assert prefill.kv_bytes.low == pytest.approx((40 - 1 - BESIDE_KV_GIB.high) * GIB)
    assert prefill.kv_bytes.high == pytest.approx((40 - 1 - BESIDE_KV_GIB.low) * GIB)
    assert any("activations" in text for text in prefill.assumed)


def test_memory_for_kv_with_a_suffix_of_vllm() -> None:
    prefill = sizing(on_gpus(), {"engine": {"args": {"kv-cache-memory-bytes": "8G"}}}).roles[0]
    assert prefill.kv_bytes == Span(low=8 * GIB, high=8 * GIB)
    with pytest.raises(RecipeError, match="vLLM takes no kv-cache-memory-bytes: 8GB") as refused:
        sizing(on_gpus(), {"prefill": {"args": {"kv-cache-memory-bytes": "8GB"}}})
    assert refused.value.where == "prefill.args.kv-cache-memory-bytes"
    assert refused.value.todo is not None


def test_memory_for_kv_on_a_cpu_by_an_option() -> None:
    left = {"engine": {"env": {"VLLM_CPU_KVCACHE_SPACE": ""}}}
    assert sizing(left, device_gib=80).roles[0].kv_bytes is None, "a CPU has no memory of a device"
    assert sizing(left, kv_gib=4).roles[0].kv_bytes == Span(low=4 * GIB, high=4 * GIB)
    assert sizing(kv_gib=4).roles[0].kv_bytes == Span(low=GIB, high=GIB), "what the recipe states comes first"


FP8_KV = {"num_bits": 8, "type": "float", "dynamic": False}


def test_the_checkpoint_asks_for_kv_of_8_bits() -> None:
    asked = {**CONFIG, "quantization_config": {"quant_method": "modelopt", "kv_cache_scheme": FP8_KV}}
    for args, blocks in (({}, 4096), ({"kv-cache-dtype": "auto"}, 4096), ({"kv-cache-dtype": "bfloat16"}, 2048)):
        prefill = sizing({"engine": {"args": args}}, config=asked).roles[0]
        assert prefill.blocks is not None
        assert prefill.blocks.low == blocks


def test_layers_that_keep_16_bits_beside_others_are_not_counted() -> None:
    some = {"kv-cache-dtype-skip-layers": ["0"]}
    assert sizing({"engine": {"args": some}}).roles[0].block_bytes, "where no layer has less, none is another"
    with pytest.raises(UnknownModelError, match="kv-cache-dtype-skip-layers"):
        sizing({"engine": {"args": {**some, "kv-cache-dtype": "fp8"}}})


def test_l1_of_all_ranks_and_of_one() -> None:
    tp = {"prefill": {"parallel": {"tp": 2}}, "platform": "cuda"}
    node, rank = (
        sizing(tp, with_lmcache(l1_size_gb=1, transfer_mode="lmcache_driven", per=per), kv_gib=1).l1[0]
        for per in ("node", "tp-rank")
    )
    assert (node.token_bytes, rank.token_bytes) == (4096, 2048)
    assert rank.tokens == 2 * node.tokens


def test_mla_is_stored_once_and_sent_to_every_rank_of_decode() -> None:
    tp = {"prefill": {"parallel": {"tp": 2}}, "decode": {"parallel": {"tp": 4}}}
    made = sizing(tp, with_lmcache(l1_size_gb=1), config=MLA, prompt_tokens=160)
    token = 4 * 576 * 2
    assert made.l1[0].token_bytes == token
    assert made.transfer is not None
    assert made.transfer.copies == 4
    assert made.transfer.request_bytes == 4 * 160 * token


def test_heads_that_several_ranks_of_decode_hold_are_sent_to_each() -> None:
    sizes = [sizing({"decode": {"parallel": {"tp": tp}}}, prompt_tokens=1000, link_gbit=8).transfer for tp in (1, 4, 8)]
    assert [size.request_bytes >> 20 for size in sizes if size is not None] == [4, 4, 8]
    assert sizes[0] is not None
    assert sizes[0].seconds == pytest.approx(8 * (512 << 10) / 1e9)


WINDOWS = {**CONFIG, "sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"] * 2}


@each_row("prompt, of_a_window", [(64, 4), (8192, 9)])
def test_of_a_window_its_blocks_and_one_more_are_sent(prompt: int, of_a_window: int) -> None:
    """Not what prefill holds while it computes: batches of 2048 tokens are in flight there."""
    long = {"engine": {"args": {"max-model-len": 16384, "block-size": 16}}}
    made = sizing(on_gpus(), long, config=WINDOWS, prompt_tokens=prompt).transfer
    assert made is not None
    assert made.request_bytes == (of_a_window + prompt // 16) * 2 * 16 * 1024
    alone = {"engine": {"args": {"disable-hybrid-kv-cache-manager": True}}}
    everything = sizing(on_gpus(), long, alone, config=WINDOWS, prompt_tokens=prompt).transfer
    assert everything is not None
    assert everything.request_bytes == prompt * 4 * 1024


def test_kv_of_a_token_is_that_of_the_rank_with_most_layers() -> None:
    split = {"prefill": {"parallel": {"pp": 2}}}
    made = sizing(on_gpus(), split, with_lmcache(l1_size_gb=1), config={**CONFIG, "num_hidden_layers": 5})
    assert made.roles[0].token_bytes == 3 * 1024
    assert made.l1[0].token_bytes == 5 * 1024, "L1 keeps the KV of all ranks"
    assert sizing(with_lmcache(l1_size_gb=2, shm_name="l1")).l1[0].shm_gib == 2


def test_recurrent_state_is_sent_once_whatever_the_prompt() -> None:
    short, long = (sizing(config=HYBRID, prompt_tokens=tokens).transfer for tokens in (256, 512))
    prefill = sizing(config=HYBRID).roles[0]
    page = prefill.groups[0].page_bytes
    assert short is not None
    assert long is not None
    assert (short.request_bytes, long.request_bytes) == (4 * page, 6 * page)


def test_the_start_is_read_once_for_a_node() -> None:
    made = recipe()
    plan = build_plan(made, nodes_for(made), run_dir=".", run_id="r", versions=VERSIONS)
    start = size_recipe(made, plan, CONFIG, None, 10_000_000_000, SizingOptions(disk_gb=2)).start
    assert start is not None
    assert start.read_seconds == 5
    assert start.engine_seconds.low < start.engine_seconds.high


@each_row("args, why", [
    ({"max-model-len": "auto"}, "max-model-len: auto"),
    ({"block-size": True}, "block-size: True"),
    ({"decode-context-parallel-size": 2}, "decode-context-parallel-size"),
])  # fmt: skip
def test_flags_that_cannot_be_counted_with_are_refused(args: dict[str, Any], why: str) -> None:
    with pytest.raises(RecipeError, match=why) as refused:
        sizing({"engine": {"args": args}})
    assert refused.value.where == f"engine.args.{next(iter(args))}"
    assert refused.value.todo is not None


def test_prefill_context_parallelism_is_refused_and_not_ignored() -> None:
    roles = {"prefill": {"connector": NIXL, "parallel": {"tp": 2, "pcp": 2}}, "decode": {"connector": NIXL}}
    with pytest.raises(RecipeError, match="prefill context parallelism") as refused:
        sizing({"platform": "cuda"}, roles, kv_gib=1)
    assert refused.value.where == "prefill.parallel.pcp"
    assert refused.value.todo == "plan without it: --set prefill.parallel.pcp=1"
    assert sizing({"platform": "cuda"}, roles, {"prefill": {"parallel": {"pcp": 1}}}, kv_gib=1).roles[0].blocks


WEIGHTS = (
    Tensor("model.embed_tokens.weight", "BF16", (1 << 20, 512)),
    Tensor("model.layers.0.mlp.up_proj.weight", "BF16", (10 << 20, 512)),
    Tensor("model.layers.0.input_layernorm.weight", "BF16", (512,)),
)
"""1 GiB of an embedding, 10 GiB of a matrix, and a norm."""


def sized(device_gib: float = 80, config: dict[str, Any] | None = None, **args: Any) -> Sizing:
    made = recipe(on_gpus(), {"engine": {"args": args}})
    plan = build_plan(made, nodes_for(made), run_dir=".", run_id="r", versions=VERSIONS)
    return size_recipe(made, plan, config or CONFIG, WEIGHTS, 0, SizingOptions(device_gib=device_gib))


@each_row("method, low", [("fp8", 6), ("nvfp4_per_token", 3.5)])
def test_from_all_matrices_at_its_bits_to_what_is_stored(method: str, low: float) -> None:
    prefill = sized(quantization=method).roles[0]
    assert prefill.weights_bytes is not None
    assert prefill.weights_bytes.low == low * GIB + 1024
    assert prefill.weights_bytes.high == 11 * GIB + 1024
    assert any(f"quantizes them while it loads them ({method})" in text for text in prefill.assumed)


def test_a_device_that_is_too_small_for_what_is_stored_is_no_certainty() -> None:
    assert {severity for severity, _ in where(sized(device_gib=11))} == {"error"}
    assert {severity for severity, _ in where(sized(device_gib=11, quantization="fp8"))} == {"warning"}
    assert {severity for severity, _ in where(sized(device_gib=6, quantization="fp8"))} == {"error"}, "even then"


QUANTIZED = {"quantization_config": {"quant_method": "fp8"}}


@each_row("args, config, bits", [
    ({}, {}, None), ({"quantization": "fp8"}, {}, 8),
    ({"quantization": "fp8"}, QUANTIZED, None),
    ({"quantization": "awq"}, {}, None), ({"quantization": "mxfp4"}, {}, 4),
    ({"quantization": "of-a-plugin"}, {}, 4),
    ({"quantization": "online", "quantization-config": {"linear": "mxfp8"}}, {}, 4),
    ({"quantization-config": {"moe": "mxfp4"}}, QUANTIZED, 4),
])  # fmt: skip
def test_which_weights_are_quantized_on_the_way(args: dict[str, Any], config: dict[str, Any], bits: int | None) -> None:
    assert quantized_bits(args, config) == bits
