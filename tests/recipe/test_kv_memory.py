"""Memory for KV as a recipe states it."""

from __future__ import annotations

from typing import Any

import pytest

from pdserve.recipe.effective import stated_kv_bytes
from pdserve.recipe.vllm_int import known_int, stated_int, vllm_int
from tests.plan.kit import on_gpus, recipe
from tests.tables import each_row

GIB = 1 << 30


@each_row("value, number", [
    (8 * GIB, 8 * GIB), ("8589934592", 8 * GIB), ("8G", 8 * GIB), (" 8G ", 8 * GIB), ("512M", GIB // 2), ("1K", 1024),
    ("1T", 1024 * GIB), ("8g", 8_000_000_000), ("25.6k", 25_600), ("1.5t", 1_500_000_000_000),
])  # fmt: skip
def test_the_suffixes_of_vllm(value: int | str, number: int) -> None:
    assert vllm_int(value) == number


@each_row("value", ["8GB", "8 G", "8GiB", "1.5G", "", "G", "8e9", "1.5", "-8G", 8.0, True, None, [8]])
def test_what_vllm_does_not_take(value: Any) -> None:
    with pytest.raises(ValueError, match="no number of vLLM"):
        vllm_int(value)


@each_row(
    "flag, value",
    [("max-model-len", "auto"), ("max-model-len", -1), ("block-size", True)],
)
def test_a_flag_that_cannot_be_counted_with(flag: str, value: object) -> None:
    assert known_int({flag: value}, flag) is None
    with pytest.raises(ValueError, match="no number"):
        stated_int({flag: value}, flag)


def test_a_flag_that_is_counted_with() -> None:
    args = {"max-model-len": "8K"}
    assert stated_int(args, "max-model-len") == known_int(args, "max-model-len") == 8192


def stated(*changes: dict[str, Any]) -> int | None:
    made = recipe(*changes)
    return stated_kv_bytes(made, made.roles()[0][1])


def test_the_variable_of_a_cpu_comes_before_the_flag() -> None:
    flag = {"engine": {"args": {"kv-cache-memory-bytes": "8G"}}}
    variable = {"engine": {"env": {"VLLM_CPU_KVCACHE_SPACE": 1}}}
    assert stated() is None
    assert stated(flag) == 8 * GIB
    assert stated(flag, variable) == GIB
    assert stated(flag, {"engine": {"env": {"VLLM_CPU_KVCACHE_SPACE": ""}}}) == 8 * GIB
    assert stated(on_gpus(), flag, variable) == 8 * GIB
    assert stated(on_gpus(), {"engine": {"args": {"kv-cache-memory-bytes": 0}}}) is None
