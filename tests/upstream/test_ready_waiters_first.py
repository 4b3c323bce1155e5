"""Who has its KV runs before those who would need the blocks that it holds."""

from __future__ import annotations

from typing import Any

from pdserve.patches.scheduler import ready_waiters_first
from tests.upstream.run import ALL_VLLM_VERSIONS, IN_RELEASE, count, on

if IN_RELEASE:
    from tests.upstream.scheduler_lab import Lab

LOADED = {"mock": {"matched": 80}}
BLOCKS = 12
STUCK: dict[str, Any] = {"order": [], "free": False}


@on(*ALL_VLLM_VERSIONS)
def test_a_head_without_room_stops_everything_before_0_31_and_not_with_the_patch(version: str) -> None:
    """From vLLM 0.31 on the patch is not applied, and upstream's own queue does it."""
    if version < "0.31":
        assert behind_a_deferred_request() == {**STUCK, "stuck": ["head", "loaded"]}
        assert behind_a_higher_priority() == {**STUCK, "stuck": ["loaded", "urgent"]}
        ready_waiters_first.PATCH.apply()
    assert behind_a_deferred_request() == {"order": ["loaded", "head"], "stuck": [], "free": True}
    assert behind_a_higher_priority() == {"order": ["loaded", "urgent"], "stuck": [], "free": True}
    order_is_kept()
    # One of each of the first two, and two of four in the one about the order.
    assert count(ready_waiters_first.NAME, "overtakings") == (4 if version < "0.31" else 0)


def behind_a_deferred_request() -> dict[str, Any]:
    """The head was told "not yet" at first, and needs the blocks of the one behind it, whose KV has arrived."""
    lab = Lab(num_blocks=BLOCKS)
    lab.add("head", 128, {"mock": {"matched": 0, "defers": 1}})
    lab.add("loaded", 96, LOADED)
    return end_of(lab)


def behind_a_higher_priority() -> dict[str, Any]:
    """Priority scheduling: a request that comes later stands before the one whose KV has arrived."""
    lab = Lab(num_blocks=BLOCKS, scheduler={"policy": "priority"})
    for name, tokens, priority, params in (("loaded", 96, 5, LOADED), ("urgent", 128, 0, None)):
        request = lab.request(name, tokens, params)
        request.priority = priority
        lab.scheduler.add_request(request)
        if name == "loaded":
            lab.step()
    return end_of(lab)


def end_of(lab: Any, limit: int = 40) -> dict[str, Any]:
    """Steps in which every load ends as soon as it can, and what has come out then."""
    order: list[str] = []
    for _ in range(limit):
        if not lab.busy:
            break
        ended = lab.loading() - lab.scheduler.finished_recving_kv_req_ids
        order += [name for name in lab.step(finished_recving=ended).num_scheduled_tokens if name not in order]
    return {"order": order, "stuck": sorted(lab.scheduler.requests), "free": lab.free_blocks == BLOCKS - 1}


def order_is_kept() -> None:
    """Enough memory: those whose KV has arrived run in their order, then the others in theirs."""
    lab = Lab(num_blocks=BLOCKS * 8)
    for name in "abcd":
        lab.add(name, 96, LOADED if name in "bd" else {"mock": {"matched": 0, "defers": 2}})
    lab.step()
    lab.step(finished_recving={"d", "b"})
    order: list[str] = []
    for _ in range(40):
        order += [name for name in lab.step().num_scheduled_tokens if name not in order]
    assert (order, lab.scheduler.requests) == (["b", "d", "a", "c"], {})
