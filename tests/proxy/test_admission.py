"""The gate of a pool: never over its limits, nobody forgotten, the better priority first, and in order within one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.pd.config.settings import PoolLimits
from pdserve.pd.errors import ApiError
from pdserve.pd.limits import admission
from pdserve.pd.limits.admission import CELLS_PER_PROCESS, AdmissionGate, Ticket
from pdserve.pd.processes import shared_numbers
from pdserve.pd.processes.shared_numbers import Numbers
from pdserve.pd.relay.entrance import admit
from pdserve.pd.serve.request_parser import priority_of
from pdserve.pd.workers import load
from pdserve.pd.workers.load import LoadBoard
from pdserve.pd.workers.registry import Slots


@dataclass
class Worker:
    kv_usage: float = 0.0


def no_worker() -> ApiError:
    return ApiError(503, "Nobody is there.")


def gate(pool: list[Worker] | None = None, numbers: Numbers | None = None, **limits: Any) -> AdmissionGate:
    workers = pool or [Worker()]
    numbers = numbers or shared_numbers.private_numbers(CELLS_PER_PROCESS)
    return AdmissionGate("decode", PoolLimits(**limits), lambda: workers, numbers, no_worker)


async def turns() -> None:
    """What was woken runs."""
    for _ in range(3):
        await asyncio.sleep(0)


def queued(door: AdmissionGate, priority: int = 0, tokens: int = 0) -> asyncio.Task[Ticket]:
    return asyncio.create_task(admit(door, priority, tokens))


def test_the_limit_is_for_each_worker_and_a_ticket_is_given_back_once() -> None:
    door = gate([Worker(), Worker()], max_requests=2)
    tickets = [door.try_admit() for _ in range(5)]
    assert [ticket is not None for ticket in tickets] == [True] * 4 + [False]
    assert tickets[0] is not None
    tickets[0].release()
    tickets[0].release()
    assert door.requests == 3


def test_prompt_tokens_are_limited_and_one_that_is_larger_enters_alone() -> None:
    door = gate(max_prompt_tokens_in_flight=100)
    large = door.try_admit(0, 1000)
    assert large is not None
    assert door.try_admit(0, 1) is None
    large.release()
    assert door.try_admit(0, 60) is not None
    assert door.try_admit(0, 41) is None
    assert door.try_admit(0, 40) is not None


async def test_a_small_request_does_not_overtake_a_large_one_of_its_priority() -> None:
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


async def test_a_better_priority_evicts_the_last_of_the_worst() -> None:
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
    assert door.rejected_full == 2
    door._interval = 4.0
    assert door.retry_after() == 16, "the queue at its pace"
    inside.release()
    await turns()
    assert [task.done() for task in (urgent, fair, first)] == [True, False, False]
    fair.cancel()
    first.cancel()


async def test_whoever_waits_too_long_gets_429_and_leaves_no_trace() -> None:
    door = gate(max_requests=1, queue_seconds=0.001)
    inside = await admit(door)
    with pytest.raises(ApiError, match="no place has become free") as late:
        await admit(door)
    assert late.value.status == 429
    assert (door.waiting, door.requests, door.rejected_late) == (0, 1, 1)
    inside.release()
    assert door.requests == 0


async def test_a_waiter_that_leaves_makes_way_for_the_one_behind_it() -> None:
    door = gate(max_prompt_tokens_in_flight=100)
    await admit(door, 0, 60)
    large, small = queued(door, 0, 80), queued(door, 0, 10)
    await turns()
    large.cancel()
    await turns()
    assert small.done()
    assert door.waiting == 0


@pytest.mark.parametrize("first", ["let in", "cancelled"])
async def test_a_place_given_to_one_who_leaves_in_the_same_turn_is_not_lost(first: str) -> None:
    door = gate(max_requests=1)
    inside = await admit(door)
    leaving, staying = queued(door), queued(door)
    await turns()
    if first == "let in":
        inside.release()
    leaving.cancel()
    if first == "cancelled":
        inside.release()
    await turns()
    assert (leaving.cancelled(), staying.done(), door.requests) == (True, True, 1)


async def test_kv_use_closes_the_gate_until_a_new_figure_opens_it() -> None:
    first, second = Worker(0.95), Worker(0.5)
    door = gate([first, second], max_kv_usage=0.9)
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


def test_an_idle_pool_takes_a_request_whatever_its_old_gauges_show() -> None:
    door = gate([Worker(1.0)], max_kv_usage=0.9)
    assert door.try_admit() is not None
    assert door.try_admit() is None


async def test_the_queue_follows_the_number_of_workers() -> None:
    pool = [Worker()]
    door = gate(pool, max_requests=1)
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


async def test_limits_can_change_while_a_request_waits() -> None:
    door = gate(max_requests=1)
    await admit(door)
    waiting = queued(door)
    await turns()
    door.configure(PoolLimits())
    await turns()
    assert waiting.done()


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
def test_limits_hold_and_order_is_kept_whatever_happens(limits: dict[str, Any], steps: list[Step]) -> None:
    asyncio.run(story(limits, steps))


async def story(limits: dict[str, Any], steps: list[Step]) -> None:
    pool = [Worker(), Worker()]
    door = gate(pool, **limits)
    inside: list[Ticket] = []
    tasks: list[asyncio.Task[None]] = []
    arrived: list[tuple[int, int]] = []
    entered: list[tuple[int, int, int]] = []
    passed = 0

    async def turn() -> None:
        nonlocal passed
        passed += 1
        await asyncio.sleep(0)

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
            await turn()
        check()
    # Everybody who waits gets in once those inside leave: no wake-up is lost.
    while True:
        for _ in range(3):
            await turn()
        check()
        if not inside:
            break
        inside.pop().release()
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


# --- the gates of one pool in several processes: one order over all of their queues


Gates = Callable[..., AdmissionGate]


@pytest.fixture
def gate_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Gates:
    """Makes the gate of one of two processes. On a busy machine neither is taken for dead. Their order is exact."""
    monkeypatch.setattr(admission, "HEARD_SECONDS", 60.0)
    monkeypatch.setattr(admission, "APART_SECONDS", 0.0)
    path = tmp_path / "numbers"
    path.touch()

    def make(process: int, *workers: Worker, **limits: Any) -> AdmissionGate:
        numbers = shared_numbers.shared_numbers(path, CELLS_PER_PROCESS * 2, process=process, processes=2)
        return gate(list(workers), numbers, **limits)

    return make


async def test_all_that_wait_enter_by_priority_and_then_in_order_of_arrival(gate_of: Gates) -> None:
    doors = gate_of(0, max_requests=1), gate_of(1, max_requests=1)
    inside = await admit(doors[0])
    order: list[str] = []

    async def enter(name: str, process: int, priority: int) -> None:
        ticket = await admit(doors[process], priority)
        order.append(name)
        ticket.release()

    tasks = []
    arrivals = [("g", 0, 5), ("c", 0, 0), ("d", 1, 0), ("a", 1, -3), ("e", 1, 0), ("f", 0, 0), ("b", 0, -3)]
    for arrival in arrivals:
        tasks.append(asyncio.create_task(enter(*arrival)))
        await turns()
    inside.release()
    await asyncio.gather(*tasks)
    assert order == list("abcdefg")
    assert [door.waiting for door in doors] == [0, 0]


async def test_a_place_changes_the_process_only_after_a_while(gate_of: Gates, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is empty until the other one looks: in the exact order of a mixed queue most places would be."""
    monkeypatch.setattr(admission, "APART_SECONDS", 3600.0)
    first, second = gate_of(0, max_requests=1), gate_of(1, max_requests=1)
    inside = await admit(first)
    waiting = queued(second)
    await turns()
    inside.release()
    after = first.try_admit()
    assert after is not None
    after.release()
    await waiting


async def test_a_newcomer_overtakes_in_another_process_only_worse_priorities(gate_of: Gates) -> None:
    first, second = gate_of(0, max_prompt_tokens_in_flight=100), gate_of(1, max_prompt_tokens_in_flight=100)
    inside = await admit(first, 0, 60)
    large = queued(second, 0, 80)
    await turns()
    assert first.try_admit(0, 10) is None
    better = first.try_admit(-1, 10)
    assert better is not None
    inside.release()
    better.release()
    assert (await large).tokens == 80


async def test_kv_use_lets_one_more_in_for_one_that_another_process_lets_out(gate_of: Gates) -> None:
    """And not the whole queue: what they cost shows late."""
    worker = Worker(0.5)
    first, second = gate_of(0, worker, max_kv_usage=0.9), gate_of(1, worker, max_kv_usage=0.9)
    leaving, staying = await admit(first), await admit(first)
    worker.kv_usage = 0.95
    second.refresh()
    waiting = [queued(second) for _ in range(3)]
    await turns()
    worker.kv_usage = 0.5
    second.refresh()
    await waiting[0]
    leaving.release()
    await waiting[1]
    assert not waiting[2].done()
    staying.release()
    await waiting[2]


async def test_what_one_process_alone_takes_for_full_holds_up_no_other(gate_of: Gates) -> None:
    """It has lost sight of a worker that the other one sees."""
    first, second = gate_of(0, max_requests=1), gate_of(1, Worker(), Worker(), max_requests=1)
    inside = await admit(first)
    waiting = queued(first)
    await turns()
    other = second.try_admit()
    assert other is not None
    assert not waiting.done()
    other.release()
    inside.release()
    await waiting


async def test_a_process_that_has_died_or_hangs_is_waited_for_by_nobody(
    gate_of: Gates, monkeypatch: pytest.MonkeyPatch
) -> None:
    hung = gate_of(1, max_requests=1)

    async def wait_in(door: AdmissionGate) -> None:
        door.enqueue()

    door = gate_of(0, max_requests=1)
    inside = await admit(door)
    # Its loop ends, and what waits there stays.
    await asyncio.to_thread(asyncio.run, wait_in(hung))
    inside.release()
    assert door.try_admit() is None
    monkeypatch.setattr(admission, "HEARD_SECONDS", 0.1)
    await admit(door)


async def test_a_successor_clears_a_dead_process_place_in_the_order(gate_of: Gates) -> None:
    first, second = gate_of(0, max_requests=1), gate_of(1, max_requests=1)
    inside = await admit(first)
    second.enqueue()
    inside.release()
    assert first.try_admit() is None
    gate_of(1, max_requests=1)
    assert first.try_admit() is not None


# --- places for transfers at one prefill: one count and one order over all processes of the proxy


PROCESSES = 2
Process = Callable[[int], Slots]


@pytest.fixture
def process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Process:
    """Makes the places of a prefill with two of them, as a process sees them."""
    monkeypatch.setattr(load, "HEARD_SECONDS", 60.0)
    monkeypatch.setattr(load, "APART_SECONDS", 0.0)
    path = tmp_path / "numbers"
    path.touch()

    def made(index: int) -> Slots:
        size = LoadBoard.cells(PROCESSES)
        board = LoadBoard(shared_numbers.shared_numbers(path, size, process=index, processes=PROCESSES))
        return Slots(board.worker("prefill-0"), 3)

    return made


class Waiting:
    """A leg that takes its place as soon as it may."""

    def __init__(self, slots: Slots) -> None:
        self.slots = slots
        self.has_place = asyncio.Event()
        self._poke = self._take  # one object: the queue knows it by that
        slots.enqueue(self._poke)

    def _take(self) -> None:
        if self.slots.is_next(self._poke) and self.slots.take_turn():
            self.slots.dequeue(self._poke)
            self.has_place.set()


def full(first: Slots) -> None:
    assert [first.take(), first.take()] == [True, True]


def test_places_are_counted_over_all_processes_and_a_successor_gives_back(process: Process) -> None:
    first, second = process(0), process(1)
    assert [slots.take() for slots in (first, second, first, second)] == [True, True, False, False]
    first.give()
    assert (first.free, second.free) == (1, 1)
    process(1)
    assert first.free == 2


async def test_who_came_first_has_the_place_first_whichever_process_it_is_in(process: Process) -> None:
    first, second = process(0), process(1)
    full(first)
    earlier, later = Waiting(second), Waiting(first)
    first.give()
    assert not first.take(), "nor does one that comes now"
    await earlier.has_place.wait()
    assert not later.has_place.is_set()
    first.give()
    await later.has_place.wait()


async def test_a_process_that_hangs_is_waited_for_by_nobody(process: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    async def wait_in(slots: Slots) -> None:
        Waiting(slots)

    first, second = process(0), process(1)
    full(first)
    await asyncio.to_thread(asyncio.run, wait_in(second))  # its loop ends, and looks no more
    first.give()
    assert not first.take()
    monkeypatch.setattr(load, "HEARD_SECONDS", 0.0)
    assert first.take()
