"""Loads that have failed: the whole request is computed anew, or fails, and stops no other that has arrived."""

from __future__ import annotations

from typing import Any

import pytest

from pdserve.patches.scheduler import failed_group, failed_loads_stand_back, ready_waiters_first, stale_completions
from tests.upstream.run import ALL_VLLM_VERSIONS, IN_RELEASE, VLLM_VERSIONS, count, on

if IN_RELEASE:
    from tests.upstream import simulation
    from tests.upstream.scheduler_lab import Lab


PROMPT, LOADED = 128, 112
ENDS = {
    "recompute": {"computed_anew": True, "tokens": [4, 12], "reason": "length", "all_blocks_free": True},
    "fail": {"computed_anew": False, "tokens": [0, 12], "reason": "error", "all_blocks_free": True},
}


@on(*ALL_VLLM_VERSIONS)
def test_failed_blocks_kill_the_engine_before_0_30_and_not_with_the_patch(version: str) -> None:
    """From 0.31 on a connector of a hybrid model has to name the request; Mooncake and lmcache 0.5.6 do."""
    if version < "0.30":
        for policy in ENDS:
            for group in (0, 1):
                with pytest.raises(ValueError, match=r"too many values to unpack \(expected 1\)"):
                    failed_load(policy, group)
        failed_group.PATCH.apply()
    for policy, end in ENDS.items():
        for group in (0, 1):
            if version < "0.31":
                assert failed_load(policy, group) == end, (policy, group)
            else:
                with pytest.raises(RuntimeError, match="failed_recving"):
                    failed_load(policy, group)
        if version >= "0.30":
            assert failed_load(policy, None) == end, policy
    assert count(failed_group.NAME, "whole-recomputations") == (4 if version < "0.30" else 0)


def failed_load(policy: str, group: int | None) -> dict[str, Any]:
    """`group`: whose blocks the worker reports; None: it reports the request (vLLM >= 0.30)."""
    lab = Lab(sliding_window=32, load_failure_policy=policy)
    free = lab.free_blocks
    lab.add("other", 40, max_tokens=12)
    lab.add("a", PROMPT, {"mock": {"matched": LOADED}})
    lab.step()
    assert lab.status("a") == "WAITING_FOR_REMOTE_KVS"
    null = lab.pool.null_block.block_id
    # A worker lists what it was told to fill: in a sliding window's group the null block too.
    report = {"failed_recving": {"a"}} if group is None else {"invalid_block_ids": {*lab.blocks("a", group)[-2:], null}}
    lab.book.failed.add("a")
    lab.step(finished_recving={"a"}, **report)
    scheduled = sum(lab.step().num_scheduled_tokens.get("a", 0) for _ in range(40))
    return {
        "computed_anew": scheduled >= PROMPT,
        "tokens": [len(lab.outputs.get(name, [])) for name in ("a", "other")],
        "reason": lab.finish_reasons.get("a"),
        "all_blocks_free": lab.free_blocks == free,
    }


NAME = failed_loads_stand_back.PATCH.name


def apply() -> None:
    for each in (stale_completions, *(() if IN_RELEASE > "0.31" else (ready_waiters_first,)), failed_loads_stand_back):
        each.PATCH.apply()


@on(*VLLM_VERSIONS)
def test_a_failed_load_without_room_stops_everything_and_not_with_the_patch(version: str) -> None:
    """From 0.30 on: before, no worker can report a failed load of several groups. In 0.30 it is ready-waiters-first."""
    assert (version >= "0.30") == simulation.REPORTS_FAILED_LOADS
    if version >= "0.30":
        assert tokens_of_failed_and_arrived() == [0, 0]
        apply()
        assert tokens_of_failed_and_arrived() == tokens_of_failed_and_arrived("priority") == [4, 4]
        assert count(NAME, "stood-back") == (2 if version > "0.31" else 0)


def tokens_of_failed_and_arrived(policy: str = "fcfs") -> list[int]:
    """Both loads fit beside each other; computing the first takes more, its sliding window having to slide."""
    lab = Lab(num_blocks=29, max_num_batched_tokens=512, sliding_window=48, scheduler={"policy": policy})
    free = lab.free_blocks
    lab.add("fails", 169, {"mock": {"matched": 169}})
    lab.add("arrives", 144, {"mock": {"matched": 144}})
    lab.step()
    assert lab.loading() == {"arrives", "fails"}
    lab.book.failed.add("fails")
    lab.step(finished_recving={"fails", "arrives"}, failed_recving={"fails"})
    for _ in range(40):
        lab.step()
    assert lab.busy or lab.free_blocks == free
    return [len(lab.outputs.get(name, ())) for name in ("fails", "arrives")]


@on(*VLLM_VERSIONS)
def test_a_load_that_is_offered_again_would_have_to_fit_twice_and_not_with_the_patch() -> None:
    assert loads_and_tokens_when_offered_again() == (1, 0)
    apply()
    assert loads_and_tokens_when_offered_again() == (2, 4)
    assert count(NAME, "reservations-dropped") == 1


def loads_and_tokens_when_offered_again() -> tuple[int, int]:
    """By a peer that offers the same KV again after a failed load, of more than half of all blocks."""
    lab = Lab(num_blocks=21, max_num_batched_tokens=512)
    lab.add("a", 12 * 16, {"mock": {"matched": 12 * 16, "offers_again": True}})
    lab.step()
    lab.book.failed.add("a")
    lab.step(finished_recving={"a"}, invalid_block_ids=lab.blocks("a"))
    for _ in range(40):
        lab.step(finished_recving=lab.loading() - lab.scheduler.finished_recving_kv_req_ids)
    assert lab.free_blocks == 20
    return len(lab.book.loads), len(lab.outputs.get("a", ()))
