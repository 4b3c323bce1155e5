"""LMCache's L1 on a large host: what is pinned, and at which share of it eviction begins.

The defects are in every version with an MP server, the installed one included: none has growth on demand.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from tests.upstream.probes.lmcache_old_allocator import FINAL, INITIAL
from tests.upstream.run import INSTALLED_VLLM, probe

pytestmark = pytest.mark.upstream
VERSIONS = ("0.4.5", "0.4.6", "0.4.7", None)
"""Oldest with a connector for vLLM, the two around the move of the module, and what is installed."""
MIB = 1 << 20


@cache
def seen(lmcache: str | None) -> dict[str, Any]:
    found: dict[str, Any] = probe(INSTALLED_VLLM, "tests.upstream.probes.lmcache_old_allocator", lmcache=lmcache)
    return found


@pytest.mark.parametrize("lmcache", VERSIONS)
def test_upstream_pins_all_of_l1_although_nothing_is_stored_and_ours_only_what_is_used(lmcache: str | None) -> None:
    without, ours = seen(lmcache)["without"]["growth"], seen(lmcache)["with"]["growth"]
    assert without["at_rest"] == FINAL
    assert ours["at_rest"] == ours["after_small"] == INITIAL
    assert 40 * MIB <= ours["after_large"] <= 60 * MIB


@pytest.mark.parametrize("lmcache", VERSIONS)
def test_ours_reaches_the_same_capacity_refuses_at_the_same_point_and_gives_all_back(lmcache: str | None) -> None:
    without, ours = seen(lmcache)["without"]["growth"], seen(lmcache)["with"]["growth"]
    for one in (without, ours):
        assert (one["full"], one["got"], one["refused"]) == (FINAL, FINAL // MIB, 0)
        assert one["consistent"]
        assert one["left_pinned"] == 0


@pytest.mark.parametrize("lmcache", VERSIONS)
def test_eviction_looks_at_the_final_size_and_not_at_what_is_committed(lmcache: str | None) -> None:
    without, ours = seen(lmcache)["without"]["early"], seen(lmcache)["with"]["early"]
    assert without["used"] == ours["used"] == 17 * MIB
    assert without["used"] / without["total"] > 0.8, "17 % full, and above the watermark"
    assert ours["total"] == FINAL


@pytest.mark.parametrize("lmcache", VERSIONS)
def test_growth_on_demand_alone_would_evict_for_ever_instead_of_growing(lmcache: str | None) -> None:
    assert seen(lmcache)["demand_alone"]["total"] == INITIAL


@pytest.mark.parametrize("lmcache", VERSIONS)
def test_threads_that_need_room_at_once_get_each_byte_once(lmcache: str | None) -> None:
    crowd = seen(lmcache)["with"]["crowd"]
    assert (crowd["got"], crowd["overlaps"]) == (80, 0)
    assert crowd["heap"] == crowd["pinned"] < FINAL


@pytest.mark.parametrize("lmcache", VERSIONS)
def test_growth_is_counted_and_allocators_that_do_not_grow_are_left_alone(lmcache: str | None) -> None:
    assert seen(lmcache)["effects"]["lmcache-demand-pinned/expansions"] > 0
    assert seen(lmcache)["with"]["other_allocator"] == [1, 2]
