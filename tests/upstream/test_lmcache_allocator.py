"""LMCache's L1 on a large host: what is pinned, and at which share of it eviction begins.

On the installed LMCache: no release has growth on demand.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from tests.upstream.probes.lmcache_allocator import FINAL, INITIAL
from tests.upstream.run import INSTALLED_VLLM, probe

pytestmark = pytest.mark.upstream
MIB = 1 << 20


@cache
def seen() -> dict[str, Any]:
    results: dict[str, Any] = probe(INSTALLED_VLLM, "tests.upstream.probes.lmcache_allocator")
    return results


def test_upstream_pins_all_of_l1_although_nothing_is_stored_and_ours_only_what_is_used() -> None:
    without, ours = seen()["without"]["growth"], seen()["with"]["growth"]
    assert without["at_rest"] == FINAL
    assert ours["at_rest"] == ours["after_small"] == INITIAL
    assert 40 * MIB <= ours["after_large"] <= 60 * MIB


def test_ours_reaches_the_same_capacity_refuses_at_the_same_point_and_gives_all_back() -> None:
    without, ours = seen()["without"]["growth"], seen()["with"]["growth"]
    for allocator in (without, ours):
        assert (allocator["full"], allocator["got"], allocator["refused"]) == (FINAL, FINAL // MIB, 0)
        assert allocator["consistent"]
        assert allocator["left_pinned"] == 0


def test_eviction_looks_at_the_final_size_and_not_at_what_is_committed() -> None:
    without, ours = seen()["without"]["early"], seen()["with"]["early"]
    assert without["used"] == ours["used"] == 17 * MIB
    assert without["used"] / without["total"] > 0.8, "17 % full, and above the watermark"
    assert ours["total"] == FINAL


def test_growth_on_demand_alone_would_evict_for_ever_instead_of_growing() -> None:
    assert seen()["demand_alone"]["total"] == INITIAL


def test_threads_that_need_room_at_once_get_each_byte_once() -> None:
    crowd = seen()["with"]["crowd"]
    assert (crowd["got"], crowd["overlaps"]) == (80, 0)
    assert crowd["heap"] == crowd["pinned"] < FINAL


def test_growth_is_counted_and_allocators_that_do_not_grow_are_left_alone() -> None:
    assert seen()["effects"]["lmcache-demand-pinned/expansions"] > 0
    assert seen()["with"]["other_allocator"] == [1, 2]
