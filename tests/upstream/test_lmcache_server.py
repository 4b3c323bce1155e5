"""Reloads against a real LMCache server (the installed release, on CPU): bytes, ranks, queues, ways of moving KV."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from tests.upstream.run import INSTALLED_VLLM, probe

pytestmark = pytest.mark.upstream
WORKLOADS = 8


@cache
def reloads() -> Any:
    return probe(INSTALLED_VLLM, "tests.upstream.probes.lmcache_bytes", str(WORKLOADS))


@cache
def workers() -> Any:
    return probe(INSTALLED_VLLM, "tests.upstream.probes.lmcache_workers")


def test_a_reload_writes_only_beyond_a_local_prefix_that_ends_inside_a_chunk() -> None:
    """So nothing need be computed up to the boundary first: upstream's skip_first_n_tokens.

    48 tokens of the first chunk (64) are the engine's own: their three blocks keep what it computed, mark 2. All that
    follows has what the other engine computed, mark 1.
    """
    results = reloads()["inside a chunk"]
    assert results["local"] == [48]
    assert results["marks"] == [2] * 3 + [1] * (512 // 16 - 3)
    assert results["locked"] == 0


def test_what_is_reloaded_attended_to_and_stored_is_right_in_every_byte() -> None:
    """The engines assert it in each step, and that no block outside a reload changes; with caps and minima."""
    workloads = reloads()["workloads"]
    assert len(workloads) == WORKLOADS
    assert all(workload["reloads"] > 0 and workload["loaded"] > 0 for workload in workloads)
    assert sum(workload["inside a chunk"] for workload in workloads) > 5
    for when in ("locked while it lived", "locked"):
        assert [workload[when] for workload in workloads] == [0] * WORKLOADS, when


def test_a_hit_is_what_every_rank_has_stored() -> None:
    """One lookup covers the objects of all ranks: no rank answers for itself, so none can answer 0 by mistake."""
    assert workers()["hit"] == {"rank 0 alone": 0, "half of rank 1": 128, "all of rank 1": 256, "locked": 0}


def test_with_a_transfer_thread_for_each_rank_no_reload_waits_for_the_stores_of_another_rank() -> None:
    """LMCache's default is one thread for all; pdserve plans one for each engine worker (--max-workers)."""
    assert workers()["one thread, other rank"] == 0, "all stores of the burst were done first"
    assert workers()["a thread each, other rank"] > 12, "most of the 24 stores were still to come"


def test_a_reload_waits_for_the_earlier_stores_of_its_own_rank() -> None:
    """As it must: a store of a preempted request may still read the blocks that the reload gets."""
    assert workers()["a thread each, same rank"] == 0


def test_a_worker_whose_way_of_moving_kv_the_server_does_not_serve_waits_until_its_timeout_and_blames_the_network() -> (
    None
):
    """Also with both sides' defaults on CPU, so pdserve names the mode on both and compares them in the recipe."""
    for pair in ("engine_driven worker, lmcache_driven server", "worker left to itself, lmcache_driven server"):
        assert "Is the server running?" in workers()[pair]
    assert workers()["engine_driven worker, auto server"] == "registered"
