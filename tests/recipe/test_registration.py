"""The warning that engines may not be registered before the server has pinned its L1."""

from __future__ import annotations

from typing import Any

from pdserve.recipe.load.problems import Problem
from pdserve.recipe.rules.caches import registration_timeouts
from tests.plan.kit import on_gpus, recipe, with_lmcache
from tests.tables import each_row

ON_DEMAND = {"LMCACHE_ROCM_DEMAND_PINNED_ALLOCATOR": "1"}
GIB = 1 << 30


def problems(platform: str = "rocm", args: dict[str, Any] | None = None, **section: Any) -> list[Problem]:
    changes = {"prefill": {"args": args or {}}}
    return [*registration_timeouts(recipe(on_gpus(4, 4, platform=platform), with_lmcache(**section), changes))]


@each_row("l1, seconds, advised", [(900, 300, 900), (1200, 1199, 1200), (100, 60, 300)])
def test_a_second_for_each_gib_of_l1(l1: int, seconds: int, advised: int) -> None:
    [problem] = problems(l1_size_gb=l1, mq_timeout_seconds=seconds)
    assert problem.path == ("lmcache", "mq_timeout_seconds")
    assert f"within {seconds} s" in problem.what
    assert f"{l1} GiB" in problem.what
    assert problem.todo == f"write lmcache.mq_timeout_seconds: {advised}"


def test_what_it_advises_is_enough_for_it() -> None:
    for l1 in (61, 299, 300, 301, 2500):
        [problem] = problems(l1_size_gb=l1)
        assert problems(l1_size_gb=l1, mq_timeout_seconds=int(str(problem.todo).rpartition(" ")[2])) == []


@each_row("l1, seconds", [(1200, 1200), (300, 300), (60, 60)])
def test_the_published_pair_and_smaller_ones_are_enough(l1: int, seconds: int) -> None:
    assert problems(l1_size_gb=l1, mq_timeout_seconds=seconds) == []


def test_kv_of_a_stated_size_is_registered_too_by_every_worker() -> None:
    stated = {"kv-cache-memory-bytes": 100 * GIB}
    assert problems(l1_size_gb=900, mq_timeout_seconds=900) == []
    [problem] = problems(l1_size_gb=900, mq_timeout_seconds=900, args=stated)
    assert "1300 GiB" in problem.what


def test_l1_that_is_pinned_on_demand_counts_with_what_is_pinned_at_the_start() -> None:
    assert problems(l1_size_gb=2500, l1_init_size_gb=20, env=ON_DEMAND) == []
    [problem] = problems(l1_size_gb=2500, l1_init_size_gb=200, env=ON_DEMAND)
    assert "200 GiB" in problem.what


@each_row("platform", ["cuda", "cpu"])
def test_no_such_stall_is_known_of_other_platforms(platform: str) -> None:
    assert problems(platform, l1_size_gb=2500) == []
