"""Chunks over groups whose blocks have different sizes: what fits, what never does, and what to use instead."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.models.kv_cache import (
    TableGroup,
    good_chunk,
    lmcache_refusal,
    offloading_refusal,
    scheduler_block,
)

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


def test_attention_is_shared_out_over_context_parallel_ranks_and_state_is_not() -> None:
    assert scheduler_block((TableGroup(16), TableGroup(32, "recurrent")), dcp=4) == 64


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
