"""Who has lost its load must not stop those whose load has arrived (hybrid models), nor its own next load."""

from __future__ import annotations

from pdserve.patches.scheduler import failed_loads_stand_back, ready_waiters_first, stale_completions
from tests.upstream.run import IN_RELEASE, VLLM_VERSIONS, count, on

if IN_RELEASE:
    from tests.upstream import simulation
    from tests.upstream.scheduler_lab import Lab

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
