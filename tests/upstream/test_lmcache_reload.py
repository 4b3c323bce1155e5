"""How much of a prompt one reload takes (max_tokens_per_load, min_load_tokens), on the real Scheduler and connector;
and that no read lock of it stays behind, with such bounds or without.

A ledger stands in for the LMCache server: it raises when a read lock is given back that nobody holds. Blocks have
contents: a step that would attend to, or store, what is not computed or loaded is an error too.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from tests.upstream.run import VLLM_VERSIONS, probe

pytestmark = pytest.mark.upstream

WORKLOADS = 25


@cache
def seen(version: str) -> Any:
    return probe(version, "tests.upstream.probes.lmcache_reload", str(WORKLOADS))


@pytest.fixture(params=VLLM_VERSIONS)
def cases(request: pytest.FixtureRequest) -> Any:
    return seen(request.param)


def test_a_reload_takes_whole_chunks_up_to_the_cap_and_the_rest_is_computed_and_stored(cases: Any) -> None:
    theirs, ours = cases["theirs"]["whole"], cases["ours"]["whole"]
    assert theirs["loads"] == [[0, 1792]], "upstream has no cap"
    assert ours["loads"] == [[0, 512]]
    assert ours["computed"] == theirs["computed"] + 1792 - 512
    assert ours["stored"] == 1792 - 512, "what is computed is stored like any new token"
    assert ours["locked"] == 0


def test_a_cap_of_the_answer_alone_asks_for_chunks_that_have_no_blocks(cases: Any) -> None:
    """As published: the tracker still has the whole hit, so all of it is retrieved into the blocks of a part."""
    assert cases["naive cap"] != "fine"


def test_a_local_prefix_that_ends_inside_a_chunk_is_neither_loaded_again_nor_counted_as_loaded(cases: Any) -> None:
    assert cases["theirs"]["inside"]["loads"] == [[48, 1792]]
    assert cases["ours"]["inside"]["loads"] == [[48, 512]], "at most 512, and up to a boundary of chunks"
    assert cases["ours"]["inside"]["locked"] == 0


def test_asking_in_every_step_while_blocks_are_lacking_releases_each_lock_once(cases: Any) -> None:
    ours = cases["ours"]["waits"]
    assert ours["polls"] > 10
    assert ours["done"]
    assert ours["loads"] == [[0, 512]]
    assert ours["locked"] == 0
    # 896 tokens are the other request's.
    assert ours["stored"] == 896 + 1792 - 512


def test_a_reload_below_the_minimum_is_computed_with_no_lock_left(cases: Any) -> None:
    theirs, ours = cases["theirs"]["small"], cases["ours"]["small"]
    assert theirs["loads"] == [[0, 64]]
    assert ours["loads"] == []
    assert ours["computed"] == theirs["computed"] + 64
    assert ours["locked"] == 0
    assert cases["ours"]["small enough"]["loads"] == [[0, 128]], "the minimum itself is loaded"


@pytest.mark.parametrize("when", ["aborted", "aborted, no answer yet"])
def test_a_request_that_ends_before_it_has_blocks_leaves_nothing(cases: Any, when: str) -> None:
    assert cases["theirs"][when]["locked"] == 28, "every chunk of the hit stays locked until the read TTL"
    for ours in (cases["ours"][when], cases["without bounds"][when]):
        assert (ours["locked before"], ours["locked"], ours["trackers"]) == (28, 0, 0)
        assert ours["free"] == 129, "no block is lost: 130 without the null block"


def test_without_bounds_a_reload_is_upstreams(cases: Any) -> None:
    for case in ("whole", "inside", "small", "small enough"):
        assert cases["without bounds"][case] == cases["theirs"][case]


def test_random_workloads_with_aborts_leave_locks_with_upstreams_class_and_none_with_ours(cases: Any) -> None:
    """vllm#44100: an engine with LMCache alone. Below our MultiConnector upstream's class leaves none either."""
    random = cases["random without bounds"]
    assert any("locks left" in wrong for wrong in random["theirs"]["wrong"])
    assert random["without bounds"]["wrong"] == []


def test_as_a_child_of_our_multiconnector_which_looks_after_lookups_too_each_lock_is_released_once(cases: Any) -> None:
    child = cases["child"]
    assert child["whole"]["loads"] == [[0, 512]]
    assert child["small"]["loads"] == []
    assert child["aborted"]["locked before"] == child["aborted, no answer yet"]["locked before"] == 28
    assert {name: (case["locked"], case["trackers"], case["done"]) for name, case in child.items()} == dict.fromkeys(
        ("whole", "small", "aborted", "aborted, no answer yet"), (0, 0, True)
    )


def test_the_effects_are_counted(cases: Any) -> None:
    effects = cases["effects"]
    assert effects["lmcache-load-cap loads-capped"] == 3
    assert effects["lmcache-load-cap tokens-left-to-recompute"] == 3 * (1792 - 512)
    assert effects["lmcache-lookup-locks lookups-released"] == 4, "two with bounds, two without"
    assert effects["lmcache-min-load loads-skipped"] == 1
    assert effects["lmcache-min-load tokens-left-to-recompute"] == 64
    assert effects["lmcache-load-cap instances"] == 5
    assert effects["lmcache-min-load instances"] == 2


def test_random_workloads_on_too_few_blocks_leave_no_lock_and_never_read_or_store_what_is_not_there(
    cases: Any,
) -> None:
    random = cases["random"]
    assert random["wrong"] == []
    assert random["loads"] > 2 * WORKLOADS
    assert random["preempted"] > 0
    assert cases["random effects"]["lmcache-load-cap loads-capped"] > WORKLOADS
    assert cases["random effects"]["lmcache-min-load loads-skipped"] > 5
    assert random["verdicts"] == {"done": WORKLOADS}, "no deadlock: vllm#44560"
