"""The type of KV that a checkpoint asks for, in every layout that vLLM reads; and what it does not load."""

from __future__ import annotations

from typing import Any

import pytest

from pdserve.models.config_json import UnknownModelError, kv_dtype_of
from tests.tables import each_row

FLOAT_8: dict[str, Any] = {"num_bits": 8, "type": "float", "dynamic": False, "strategy": "tensor", "symmetric": True}
FLOAT_4: dict[str, Any] = {"num_bits": 4, "type": "float", "dynamic": False}
PRODUCER = {"name": "modelopt", "version": "0.29.0"}


def kv(latent: bool = False, **quantization: Any) -> str | None:
    return kv_dtype_of({"quantization_config": quantization}, latent=latent)


@each_row("quantization, expected", [
    ({"quant_method": "modelopt", "kv_cache_scheme": FLOAT_8}, "fp8"),
    ({"quant_method": "MODELOPT_FP4", "kv_cache_scheme": FLOAT_4}, "nvfp4"),
    ({"quant_method": "modelopt", "kv_cache_scheme": {**FLOAT_8, "dynamic": True}}, None),
    ({"quant_method": "modelopt", "kv_cache_scheme": {**FLOAT_8, "type": "int"}}, None),
    ({"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"}, "fp8"),
    ({"quant_method": "modelopt_fp4", "quantization": {"kv_cache_quant_algo": "NVFP4"}}, "nvfp4"),
    ({"quant_method": "modelopt", "quantization": {"kv_cache_scheme": FLOAT_8}}, "fp8"),
    ({"quant_method": "fp8", "kv_cache_scheme": FLOAT_8}, None),
])  # fmt: skip
def test_modelopt(quantization: dict[str, Any], expected: str | None) -> None:
    assert kv(**quantization) == expected


@each_row("algorithm", ["FP8", "fp8_pb_wo", "NVFP4"])
def test_the_layout_of_modelopt_without_a_quant_method(algorithm: str) -> None:
    inner = {"quant_algo": algorithm, "kv_cache_quant_algo": "FP8"}
    assert kv(producer=PRODUCER, quantization=inner) == "fp8"
    assert kv(quantization={**inner, "modelopt_quant_config": {}}) == "fp8"
    assert kv(quantization=inner) is None, "whose it is, is not stated"


def test_an_algorithm_that_vllm_does_not_load_is_refused() -> None:
    with pytest.raises(UnknownModelError, match="W4A8_AWQ"):
        kv(producer=PRODUCER, quantization={"quant_algo": "W4A8_AWQ", "kv_cache_quant_algo": "FP8"})


def test_compressed_tensors() -> None:
    method = "compressed-tensors"
    assert kv(quant_method=method, kv_cache_scheme=FLOAT_8) == "fp8"
    assert kv(quant_method=method, kv_cache_scheme=None) is None
    assert kv(quant_method=method, kv_cache_scheme=FLOAT_8, latent=True) is None, "MLA does not look at it"
    with pytest.raises(UnknownModelError, match="8 bits"):
        kv(quant_method=method, kv_cache_scheme={**FLOAT_8, "type": "int"})


def test_where_it_is_looked_for() -> None:
    compressed = {"quant_method": "compressed-tensors", "kv_cache_scheme": FLOAT_8}
    modelopt = {"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"}
    assert kv_dtype_of({"text_config": {"quantization_config": compressed}}, latent=False) == "fp8"
    assert kv_dtype_of({"compression_config": compressed}, latent=False) == "fp8"
    assert kv_dtype_of({"text_config": {"quantization_config": modelopt}}, latent=False) is None
    assert kv_dtype_of({}, latent=False) is None


@each_row("value", [None, [], "fp8", 4, {}, {"producer": 1, "quantization": [1]}, {"quant_method": None}])
def test_what_is_no_quantization_asks_for_nothing(value: Any) -> None:
    assert kv_dtype_of({"quantization_config": value}, latent=False) is None
