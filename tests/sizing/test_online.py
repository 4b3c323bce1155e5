"""Weights that vLLM quantizes while it loads them are a range, so nothing is sure to fail by what they take at most."""

from __future__ import annotations

from typing import Any

from pdserve.models.weights import Tensor
from pdserve.plan.build import build_plan, nodes_for
from pdserve.sizing import Given, Sizing, quantized_bits, size_recipe
from tests.plan.kit import VERSIONS, on_gpus, recipe
from tests.sizing.kit import CONFIG, where
from tests.tables import each_row

GIB = 1 << 30
WEIGHTS = (
    Tensor("model.embed_tokens.weight", "BF16", (1 << 20, 512)),
    Tensor("model.layers.0.mlp.up_proj.weight", "BF16", (10 << 20, 512)),
    Tensor("model.layers.0.input_layernorm.weight", "BF16", (512,)),
)
"""1 GiB of an embedding, 10 GiB of a matrix, and a norm."""


def sized(device_gib: float = 80, config: dict[str, Any] | None = None, **args: Any) -> Sizing:
    made = recipe(on_gpus(), {"engine": {"args": args}})
    plan = build_plan(made, nodes_for(made), run_dir=".", run_id="r", versions=VERSIONS)
    return size_recipe(made, plan, config or CONFIG, WEIGHTS, 0, Given(device_gib=device_gib))


@each_row("method, low", [("fp8", 6), ("fp8_per_tensor", 6), ("nvfp4_per_token", 3.5)])
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


def test_weights_that_are_quantized_already_are_exact() -> None:
    prefill = sized(quantization="fp8", config={**CONFIG, **QUANTIZED}).roles[0]
    assert prefill.weights_bytes is not None
    assert prefill.weights_bytes.exact
