"""The gate of a pool: never over its limits, nobody forgotten, the better priority first, and in order within one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.pd.config.settings import PoolLimits
from pdserve.pd.errors import ApiError
from pdserve.pd.limits.admission import CELLS_PER_PROCESS, AdmissionGate, Ticket
from pdserve.pd.processes import shared_numbers
from pdserve.pd.relay.entrance import admit
from pdserve.pd.serve.request_parser import priority_of


@dataclass
class Worker:
    kv_usage: float = 0.0


def no_worker() -> ApiError:
    return ApiError(503, "Nobody is there.")


def gate(*workers: Worker, **limits: Any) -> AdmissionGate:
    pool = list(workers) or [Worker()]
    return AdmissionGate(
        "decode", PoolLimits(**limits), lambda: pool, shared_numbers.private(CELLS_PER_PROCESS), no_worker
    )


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(test())


async def turns(count: int = 3) -> None:
    """What was woken runs."""
    for _ in range(count):
        await asyncio.sleep(0)


def queued(door: AdmissionGate, priority: int = 0, tokens: int = 0) -> asyncio.Task[Ticket]:
    return asyncio.create_task(admit(door, priority, tokens))


def test_without_limits_everybody_enters_at_once_and_is_counted() -> None:
    door = gate()
    tickets = [door.try_admit(0, 100) for _ in range(1000)]
    assert all(tickets)
    assert (door.requests, door.tokens) == (1000, 100_000)


def test_the_limit_is_for_each_worker() -> None:
    door = gate(Worker(), Worker(), max_requests=2)
    assert [door.try_admit() is not None for _ in range(5)] == [True] * 4 + [False]


def test_a_limit_that_no_float_holds_is_none() -> None:
    door = gate(max_requests=10**400, max_prompt_tokens_in_flight=10**400)
    assert all(door.try_admit(0, 100) for _ in range(1000))


def test_a_ticket_is_given_back_once() -> None:
    door = gate(max_requests=2)
    first, second = door.try_admit(), door.try_admit()
    assert first is not None
    assert second is not None
    first.release()
    first.release()
    assert door.requests == 1


def test_prompt_tokens_are_limited_and_one_that_is_larger_enters_alone() -> None:
    door = gate(max_prompt_tokens_in_flight=100)
    large = door.try_admit(0, 1000)
    assert large is not None
    assert door.try_admit(0, 1) is None
    large.release()
    assert door.try_admit(0, 60) is not None
    assert door.try_admit(0, 41) is None
    assert door.try_admit(0, 40) is not None


def test_each_freed_place_wakes_one_in_order() -> None:
    async def test() -> None:
        door = gate(max_requests=1)
        inside = await admit(door)
        waiting = [queued(door) for _ in range(3)]
        await turns()
        assert door.waiting == 3
        for position in range(3):
            inside.release()
            await turns()
            assert [task.done() for task in waiting] == [index <= position for index in range(3)]
            inside = waiting[position].result()
            assert door.requests == 1

    run(test)


def test_the_better_priority_goes_first_and_a_newcomer_overtakes_only_worse_ones() -> None:
    async def test() -> None:
        door = gate(max_requests=1)
        inside = await admit(door)
        order: list[str] = []

        async def enter(name: str, priority: int) -> None:
            ticket = await admit(door, priority)
            order.append(name)
            ticket.release()

        tasks = []
        for name, priority in (("late", 5), ("b", 0), ("urgent", -3), ("c", 0)):
            tasks.append(asyncio.create_task(enter(name, priority)))
            await turns()
        inside.release()
        await asyncio.gather(*tasks)
        assert order == ["urgent", "b", "c", "late"]

    run(test)


def test_a_small_request_does_not_overtake_a_large_one_of_its_priority() -> None:
    async def test() -> None:
        door = gate(max_prompt_tokens_in_flight=100)
        inside = await admit(door, 0, 60)
        large = queued(door, 0, 80)
        await turns()
        assert door.try_admit(0, 10) is None
        small = queued(door, 0, 10)
        await turns()
        assert not small.done()
        assert door.try_admit(-1, 10) is not None
        inside.release()
        await turns()
        assert (large.done(), small.done()) == (True, True)

    run(test)


def test_a_full_queue_answers_429_with_a_time_and_openais_body() -> None:
    async def test() -> None:
        door = gate(max_requests=1, queue_size=1)
        await admit(door)
        waiting = queued(door)
        await turns()
        with pytest.raises(ApiError) as refused:
            await admit(door)
        assert refused.value.status == 429
        assert refused.value.headers()["retry-after"] == "1"
        assert refused.value.body()["error"]["code"] == 429
        assert door.rejected_full == 1
        assert not waiting.done()
        waiting.cancel()

    run(test)


def test_a_better_priority_pushes_the_last_of_the_worst_out_of_a_full_queue() -> None:
    async def test() -> None:
        door = gate(max_requests=1, queue_size=3)
        inside = await admit(door)
        fair, first, last = queued(door, 0), queued(door, 7), queued(door, 7)
        await turns()
        urgent = queued(door, -1)
        await turns()
        with pytest.raises(ApiError, match="better priority"):
            last.result()
        with pytest.raises(ApiError, match="queue is full"):
            await admit(door, 7)
        inside.release()
        await turns()
        assert [task.done() for task in (urgent, fair, first)] == [True, False, False]
        fair.cancel()
        first.cancel()

    run(test)


def test_a_queue_of_size_zero_lets_no_request_wait() -> None:
    async def test() -> None:
        door = gate(max_requests=1, queue_size=0)
        await admit(door)
        with pytest.raises(ApiError):
            await admit(door)

    run(test)


def test_whoever_waits_too_long_gets_429_and_leaves_no_trace() -> None:
    async def test() -> None:
        door = gate(max_requests=1, queue_seconds=0.001)
        inside = await admit(door)
        with pytest.raises(ApiError, match="no place has become free") as late:
            await admit(door)
        assert late.value.status == 429
        assert (door.waiting, door.requests, door.rejected_late) == (0, 1, 1)
        inside.release()
        assert door.requests == 0

    run(test)


def test_a_waiter_that_leaves_makes_way_for_the_one_behind_it() -> None:
    async def test() -> None:
        door = gate(max_prompt_tokens_in_flight=100)
        await admit(door, 0, 60)
        large, small = queued(door, 0, 80), queued(door, 0, 10)
        await turns()
        large.cancel()
        await turns()
        assert small.done()
        assert door.waiting == 0

    run(test)


def test_a_place_given_to_one_who_leaves_in_the_same_turn_is_not_lost() -> None:
    async def test() -> None:
        door = gate(max_requests=1)
        inside = await admit(door)
        leaving, staying = queued(door), queued(door)
        await turns()
        inside.release()
        leaving.cancel()
        await turns()
        assert leaving.cancelled()
        assert staying.done()
        assert door.requests == 1

    run(test)


def test_one_who_has_been_cancelled_but_has_not_run_yet_gets_no_place() -> None:
    async def test() -> None:
        door = gate(max_requests=1)
        inside = await admit(door)
        leaving, staying = queued(door), queued(door)
        await turns()
        leaving.cancel()
        inside.release()
        await turns()
        assert staying.done()
        assert door.requests == 1

    run(test)


def test_kv_use_closes_the_gate_until_a_new_figure_opens_it() -> None:
    async def test() -> None:
        first, second = Worker(0.95), Worker(0.5)
        door = gate(first, second, max_kv_usage=0.9)
        assert door.try_admit() is not None
        second.kv_usage = 0.91
        door.refresh()
        waiting = [queued(door) for _ in range(3)]
        await turns()
        assert door.waiting == 3
        second.kv_usage = 0.3
        door.refresh()
        await turns()
        # One, since one worker has room: what it costs shows in the next figure.
        assert [task.done() for task in waiting] == [True, False, False]
        waiting[0].result().release()
        await turns()
        assert [task.done() for task in waiting] == [True, True, False]
        waiting[2].cancel()

    run(test)


def test_an_idle_pool_takes_a_request_whatever_its_old_gauges_show() -> None:
    door = gate(Worker(1.0), max_kv_usage=0.9)
    assert door.try_admit() is not None
    assert door.try_admit() is None


def test_a_new_worker_lets_the_queue_in_and_the_last_one_that_goes_ends_it() -> None:
    async def test() -> None:
        pool = [Worker()]
        limits = PoolLimits(max_requests=1)
        door = AdmissionGate("prefill", limits, lambda: pool, shared_numbers.private(CELLS_PER_PROCESS), no_worker)
        await admit(door)
        second, third = queued(door), queued(door)
        await turns()
        pool.append(Worker())
        door.refresh()
        await turns()
        assert (second.done(), third.done()) == (True, False)
        pool.clear()
        door.refresh()
        await turns()
        with pytest.raises(ApiError, match="Nobody is there") as raised:
            third.result()
        assert raised.value.status == 503

    run(test)


def test_limits_can_change_while_a_request_waits() -> None:
    async def test() -> None:
        door = gate(max_requests=1)
        await admit(door)
        waiting = queued(door)
        await turns()
        door.configure(PoolLimits())
        await turns()
        assert waiting.done()

    run(test)


def test_retry_after_is_the_queue_at_its_pace() -> None:
    async def test() -> None:
        door = gate(max_requests=1, queue_seconds=50)
        assert door.retry_after() == 1
        door._interval = 4.0
        inside = await admit(door)
        waiting = [queued(door) for _ in range(4)]
        await turns()
        assert door.retry_after() == 20
        door._interval = 400.0
        assert door.retry_after() == 50
        inside.release()
        for task in waiting:
            task.cancel()

    run(test)


def test_several_processes_share_the_limit_and_a_successor_clears_what_the_dead_one_held(tmp_path: Path) -> None:
    path = tmp_path / "numbers"
    path.touch()

    def process(index: int) -> AdmissionGate:
        numbers = shared_numbers.shared(path, CELLS_PER_PROCESS * 2, process=index, processes=2)
        pool = [Worker()]
        return AdmissionGate("decode", PoolLimits(max_requests=3), lambda: pool, numbers, no_worker)

    first, second = process(0), process(1)
    tickets = [first.try_admit(0, 5), second.try_admit(0, 7), first.try_admit(0, 5)]
    assert second.try_admit() is None
    assert first.try_admit() is None
    assert (second.requests, second.tokens) == (3, 17)
    assert tickets[0] is not None
    tickets[0].release()
    assert second.try_admit() is not None
    replaced = process(0)
    assert (replaced.requests, second.requests) == (2, 2)


Step = tuple[str, int, int]
LONGEST = 60
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["arrive", "arrive", "arrive", "release", "cancel", "turn", "workers", "kv"]),
        st.integers(0, 7),
        st.integers(0, LONGEST),
    ),
    max_size=60,
)
LIMITS = st.fixed_dictionaries(
    {
        "max_requests": st.sampled_from([None, 1, 2, 5]),
        "max_prompt_tokens_in_flight": st.sampled_from([None, 50, 100]),
        "max_kv_usage": st.sampled_from([None, 0.5]),
        "queue_size": st.integers(0, 6),
    }
)


@settings(max_examples=settings().max_examples * 3, deadline=None)
@given(limits=LIMITS, steps=STEPS)
def test_whatever_happens_the_limits_hold_no_request_is_forgotten_and_order_is_kept(
    limits: dict[str, Any], steps: list[Step]
) -> None:
    run(lambda: _story(limits, steps))


async def _story(limits: dict[str, Any], steps: list[Step]) -> None:
    pool = [Worker(), Worker()]
    door = AdmissionGate(
        "decode", PoolLimits(**limits), lambda: pool, shared_numbers.private(CELLS_PER_PROCESS), no_worker
    )
    inside: list[Ticket] = []
    tasks: list[asyncio.Task[None]] = []
    arrived: list[tuple[int, int]] = []
    entered: list[tuple[int, int, int]] = []
    passed = 0

    async def turn(count: int = 3) -> None:
        nonlocal passed
        for _ in range(count):
            passed += 1
            await turns(1)

    async def request(number: int, priority: int, tokens: int) -> None:
        ticket = await admit(door, priority, tokens)
        entered.append((priority, passed, number))
        inside.append(ticket)

    def check() -> None:
        most, tokens = limits["max_requests"], limits["max_prompt_tokens_in_flight"]
        assert door.requests >= len(inside)
        assert most is None or door.requests <= most * largest
        assert tokens is None or door.tokens <= max(tokens * largest, LONGEST)
        assert door.waiting <= limits["queue_size"]

    largest = len(pool)
    for what, small, number in steps:
        if what == "arrive":
            arrived.append((small, len(arrived)))
            tasks.append(asyncio.create_task(request(len(arrived) - 1, small, number)))
        elif what == "release" and inside:
            inside.pop(small % len(inside)).release()
        elif what == "cancel" and tasks:
            tasks[number % len(tasks)].cancel()
        elif what == "workers":
            pool[:] = [Worker() for _ in range(small % 4 + 1)]
            largest = max(largest, len(pool))
            door.refresh()
        elif what == "kv":
            for worker in pool:
                worker.kv_usage = small / 7
            door.refresh()
        else:
            await turn(1)
        check()
    # Everybody who waits gets in once those inside leave: no wake-up is lost.
    while True:
        await turn()
        check()
        if not inside:
            break
        inside.pop().release()
    await turn()
    assert door.waiting == 0
    assert (door.requests, door.tokens) == (0, 0)
    done = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(outcome is None or isinstance(outcome, ApiError | asyncio.CancelledError) for outcome in done)
    # Within one priority, those who came in did so in the order in which they had come. Of two that were let in in the
    # same turn of the loop, the one that had not waited notices first.
    for priority in {priority for priority, _, _ in entered}:
        numbers = [number for other, _, number in sorted(entered) if other == priority]
        assert numbers == sorted(numbers)


@pytest.mark.parametrize(
    ("asked", "best", "expected"),
    [(None, 0, 0), (None, 3, 3), (5, 0, 5), (-5, 0, 0), (-5, -10, -5), (99_999_999_999, 0, 1_000_000)],
)
def test_a_priority_is_never_better_than_the_keys(asked: int | None, best: int, expected: int) -> None:
    assert priority_of(asked, best) == expected
