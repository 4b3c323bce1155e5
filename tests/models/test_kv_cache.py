"""Blocks, groups and concurrency of tiny models, equal to what vLLM 0.32 on a CPU makes of them (recorded_vllm.json;
tests/upstream/test_model_kv.py compares the record with the installed vLLM); and chunks over groups of unequal blocks.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.models.config_json import UnknownModelError
from pdserve.models.kv_cache import (
    KvFlags,
    TableGroup,
    good_chunk,
    kv_cache,
    lmcache_refusal,
    offloading_refusal,
    scheduler_block,
    stage_bounds,
)
from pdserve.models.layers import Layer, layers_of
from tests.models.kv_of_tiny import numbers_of, sorted_groups
from tests.models.tiny_configs import TINY, Tiny
from tests.tables import each_row

RECORDED: dict[str, Any] = json.loads(Path(__file__).with_name("recorded_vllm.json").read_text())
FLAGS = KvFlags(model_len=8192, block_size=16, kernel_block=16)
LAYERS = tuple(Layer(index, "full", 8, 128, 128) for index in range(4))


@each_row("tiny", TINY)
def test_equal_to_the_block(tiny: Tiny) -> None:
    theirs = dict(RECORDED[tiny.name])
    theirs["groups"] = sorted_groups(theirs["groups"])
    ours = numbers_of(tiny)
    assert ours == {key: theirs[key] for key in ours}


@each_row("layers, pp, sizes", [(8, 2, [4, 4]), (27, 2, [14, 13]), (61, 4, [15, 15, 16, 15])])
def test_layers_of_pipeline_stages(layers: int, pp: int, sizes: list[int]) -> None:
    assert [last - first for first, last in stage_bounds(layers, pp)] == sizes


def test_groups_of_state_that_vllm_does_not_divide_are_refused() -> None:
    tiny = next(tiny for tiny in TINY if tiny.name == "nemotron-mamba2")
    with pytest.raises(UnknownModelError, match="2 groups of its recurrent state over TP 4"):
        kv_cache(layers_of(tiny.config), replace(FLAGS, tp=4))


@each_row("dtype, size", [("auto", 2.0), ("fp8", 1.0), ("fp8_e4m3", 1.0), ("bfloat16", 2.0), ("nvfp4", 0.5625)])
def test_types_of_kv(dtype: str, size: float) -> None:
    cache = kv_cache(LAYERS, replace(FLAGS, cache_dtype=dtype))
    assert cache.token_bytes == 4 * 8 * 256 * size


@each_row("dtype", ["turboquant_k8v4", "ultraquant_4bit", "int3"])
def test_a_type_of_unknown_layout_is_refused(dtype: str) -> None:
    with pytest.raises(UnknownModelError, match=dtype):
        kv_cache(LAYERS, replace(FLAGS, cache_dtype=dtype))


DEEPSEEK_V4 = tuple(map(TableGroup, (256, 64, 64, 4, 8)))
QWEN_3_5 = (TableGroup(1056), TableGroup(1056, "recurrent"))
blocks = st.lists(st.integers(1, 300), min_size=1, max_size=6)


def test_a_step_must_fill_a_block_of_state() -> None:
    assert lmcache_refusal(QWEN_3_5, 1056, max_batched_tokens=1056) is None
    assert "max-num-batched-tokens" in str(lmcache_refusal(QWEN_3_5, 1056, max_batched_tokens=1055))
    # With full attention alone, steps of any size add up to a block.
    assert lmcache_refusal((TableGroup(1056),), 1056, max_batched_tokens=64) is None


def test_state_of_two_block_sizes_is_refused_when_it_is_kept_at_block_ends() -> None:
    groups = (TableGroup(16), TableGroup(16, "recurrent"), TableGroup(32, "recurrent"))
    assert lmcache_refusal(groups, 256) == "recurrent groups with blocks of different sizes: 16, 32"


def test_a_scratch_group_does_not_count() -> None:
    assert scheduler_block((TableGroup(16), TableGroup(7, "scratch"))) == 16
    with pytest.raises(ValueError, match="no group covers tokens"):
        scheduler_block((TableGroup(7, "scratch"),))


def test_vllms_own_offloading_cuts_by_tokens_only_where_all_blocks_are_alike() -> None:
    assert offloading_refusal((TableGroup(16), TableGroup(16)), 64) is None
    assert offloading_refusal(DEEPSEEK_V4, None) is None
    assert "use blocks_per_chunk" in str(offloading_refusal(DEEPSEEK_V4, 256))
    assert offloading_refusal((TableGroup(16),), 40) == "block_size 40 is not a multiple of the KV block, 16 tokens"
    assert offloading_refusal((TableGroup(16, "scratch"),), 16) == "no group covers tokens"


@given(sizes=blocks, chunk=st.integers(1, 10_000), dcp=st.integers(1, 4))
def test_a_chunk_is_taken_exactly_when_every_group_divides_it(sizes: list[int], chunk: int, dcp: int) -> None:
    groups = tuple(map(TableGroup, sizes))
    assert (lmcache_refusal(groups, chunk, dcp=dcp) is None) == all(chunk % (size * dcp) == 0 for size in sizes)


@given(sizes=blocks, wanted=st.integers(1, 10_000))
def test_the_chunk_to_use_instead_is_taken_and_no_larger_one_below_the_wanted_is(sizes: list[int], wanted: int) -> None:
    groups = tuple(map(TableGroup, sizes))
    good = good_chunk(groups, wanted)
    assert lmcache_refusal(groups, good) is None
    assert good <= wanted or good == scheduler_block(groups)
    assert wanted - good < scheduler_block(groups)
