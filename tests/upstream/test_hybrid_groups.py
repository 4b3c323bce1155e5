"""KV of several groups in the installed LMCache and vLLM: slices, stores and geometry, and our planner beside them."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from tests.upstream.run import INSTALLED_VLLM, probe

pytestmark = pytest.mark.upstream


@cache
def seen() -> dict[str, Any]:
    results: dict[str, Any] = probe(INSTALLED_VLLM, "tests.upstream.probes.hybrid_groups")
    return results


@pytest.mark.parametrize(
    "name",
    [
        "slices_are_the_blocks_of_the_range",
        "a_range_that_cuts_a_block_is_refused",
        "a_missing_group_stores_nothing",
        "a_store_never_reaches_beyond_the_group_that_covers_least",
    ],
)
def test_lmcache_slices_and_stores_by_tokens_over_every_group(name: str) -> None:
    assert name in seen()["held"]


@pytest.mark.parametrize(
    "name",
    [
        "our_block_is_the_schedulers",
        "our_verdict_is_lmcaches",
        "our_verdict_is_vllms_offloading",
        "a_prompt_that_fills_no_chunk_is_never_stored",
    ],
)
def test_our_planner_predicts_what_the_installed_code_does(name: str) -> None:
    assert name in seen()["held"]


def test_both_verdicts_were_among_the_compared() -> None:
    for verdicts in (seen()["verdicts"], seen()["offloading"]):
        assert min(verdicts.values()) > 10


def test_the_published_rule_agrees_where_every_group_has_blocks_and_sizes_divide() -> None:
    assert seen()["published"]["all groups"] == seen()["installed"]["all groups"] == [16, 64, 64, 1024, 512]


def test_the_published_rule_stores_half_of_a_chunk_when_a_group_has_no_blocks_yet() -> None:
    """It bounds the store by the groups that have blocks, so the missing one gets no id and the others get theirs."""
    assert seen()["published"]["first group missing"] == [0, 64, 64, 1024, 512]
    assert seen()["installed"]["first group missing"] == []


def test_the_published_rule_cuts_short_where_a_chunk_is_no_multiple_of_a_block() -> None:
    """256 tokens are four blocks of 64 and, to the published rule, two of 96: 64 tokens of that group are lost."""
    assert seen()["published"]["96 beside 64, chunk 256"] == [2, 4]
    assert seen()["installed"]["96 beside 64, chunk 256"] == "ValueError"


def test_a_load_is_not_guarded_against_a_missing_group() -> None:
    """Upstream relies on vLLM for it, which gives the connector that loads the blocks of every group."""
    assert seen()["load_with_a_missing_group"] == [[1, 2, 3, 4], []]


def test_engine_driven_transfer_takes_one_group() -> None:
    assert seen()["engine_driven"] == [True, False]
