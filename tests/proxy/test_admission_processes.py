"""The gates of one pool in several processes: one order over all of their queues."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from pdserve.pd.config.settings import PoolLimits
from pdserve.pd.limits import admission
from pdserve.pd.limits.admission import CELLS_PER_PROCESS, AdmissionGate
from pdserve.pd.processes import shared_numbers
from pdserve.pd.relay.entrance import admit
from tests.proxy.test_admission import Worker, no_worker, queued, turns

Gates = Callable[..., AdmissionGate]


@pytest.fixture
def gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Gates:
    """Makes the gate of one of two processes. On a busy machine neither is taken for dead. Their order is exact."""
    monkeypatch.setattr(admission, "HEARD_SECONDS", 60.0)
    monkeypatch.setattr(admission, "APART_SECONDS", 0.0)
    path = tmp_path / "numbers"
    path.touch()

    def make(process: int, *workers: Worker, **limits: Any) -> AdmissionGate:
        numbers = shared_numbers.shared(path, CELLS_PER_PROCESS * 2, process=process, processes=2)
        pool = list(workers) or [Worker()]
        return AdmissionGate("decode", PoolLimits(**limits), lambda: pool, numbers, no_worker)

    return make


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 60))


def test_clients_of_one_process_do_not_shut_out_those_of_another(gate: Gates) -> None:
    async def test() -> None:
        served: Counter[int] = Counter()
        enough = asyncio.Event()

        async def client(door: AdmissionGate, process: int) -> None:
            while not enough.is_set():
                ticket = await admit(door)
                await turns(2)
                served[process] += 1
                ticket.release()
                if served.total() == 120:
                    enough.set()

        doors = [gate(process, max_requests=2) for process in range(2)]
        tasks = [asyncio.create_task(client(door, process)) for process, door in enumerate(doors) for _ in range(6)]
        await enough.wait()
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        assert min(served[0], served[1]) > served.total() / 4

    run(test)


def test_all_that_wait_enter_by_priority_and_then_in_order_of_arrival(gate: Gates) -> None:
    async def test() -> None:
        doors = gate(0, max_requests=1), gate(1, max_requests=1)
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

    run(test)


@pytest.mark.parametrize("apart", [3600.0, 0.0])
def test_a_place_changes_the_process_only_where_the_other_one_waits_for_much_longer(
    gate: Gates, monkeypatch: pytest.MonkeyPatch, apart: float
) -> None:
    """It is empty until the other one looks: in the exact order of a mixed queue most places would be."""
    monkeypatch.setattr(admission, "APART_SECONDS", apart)

    async def test() -> None:
        doors = gate(0, max_requests=2), gate(1, max_requests=2)
        inside = [await admit(door) for door in doors]
        order: list[int] = []
        half = asyncio.Event()

        async def enter(process: int) -> None:
            ticket = await admit(doors[process])
            order.append(process)
            if len(order) == 20:
                half.set()
            await turns()
            ticket.release()

        tasks = []
        for _ in range(20):
            for process in range(2):
                tasks.append(asyncio.create_task(enter(process)))
                await turns()
        # The first process has most of the queue's turns in one go: of its places none waits for the second one.
        inside[0].release()
        await half.wait()
        assert (1 in order) is (apart == 0)
        inside[1].release()
        await asyncio.gather(*tasks)
        assert Counter(order) == {0: 20, 1: 20}

    run(test)


def test_a_new_figure_of_kv_use_lets_in_as_many_also_where_their_turns_change_the_process(gate: Gates) -> None:
    async def test() -> None:
        workers = [Worker(0.5) for _ in range(4)]
        first, second = (gate(process, *workers, max_kv_usage=0.9) for process in range(2))
        inside = await admit(first)
        waiting = []
        for _ in range(4):
            for door in (second, first):
                waiting.append(door.enqueue().future)
        first.refresh()
        second.refresh()
        await asyncio.gather(*waiting)
        inside.release()

    run(test)


def test_a_newcomer_overtakes_in_another_process_only_worse_priorities(gate: Gates) -> None:
    async def test() -> None:
        first, second = gate(0, max_prompt_tokens_in_flight=100), gate(1, max_prompt_tokens_in_flight=100)
        inside = await admit(first, 0, 60)
        large = queued(second, 0, 80)
        await turns()
        assert first.try_admit(0, 10) is None
        better = first.try_admit(-1, 10)
        assert better is not None
        inside.release()
        better.release()
        assert (await large).tokens == 80

    run(test)


def test_a_place_that_another_process_frees_is_seen_without_being_told(gate: Gates) -> None:
    async def test() -> None:
        first, second = gate(0, max_requests=1), gate(1, max_requests=1)
        inside = await admit(first)
        waiting = queued(second)
        await turns()
        inside.release()
        await waiting

    run(test)


def test_kv_use_lets_one_more_in_for_one_that_another_process_lets_out(gate: Gates) -> None:
    """And not the whole queue: what they cost shows late."""

    async def test() -> None:
        worker = Worker(0.5)
        first, second = gate(0, worker, max_kv_usage=0.9), gate(1, worker, max_kv_usage=0.9)
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

    run(test)


def test_what_one_process_alone_takes_for_full_holds_up_no_other(gate: Gates) -> None:
    """It has lost sight of a worker that the other one sees."""

    async def test() -> None:
        first, second = gate(0, max_requests=1), gate(1, Worker(), Worker(), max_requests=1)
        inside = await admit(first)
        waiting = queued(first)
        await turns()
        other = second.try_admit()
        assert other is not None
        assert not waiting.done()
        other.release()
        inside.release()
        await waiting

    run(test)


def test_a_process_that_has_died_or_hangs_is_waited_for_by_nobody(gate: Gates, monkeypatch: pytest.MonkeyPatch) -> None:
    hung = gate(1, max_requests=1)

    async def test() -> None:
        door = gate(0, max_requests=1)
        inside = await admit(door)
        # Its loop ends, and what waits there stays.
        await asyncio.to_thread(asyncio.run, wait_in(hung))
        inside.release()
        assert door.try_admit() is None
        monkeypatch.setattr(admission, "HEARD_SECONDS", 0.1)
        await admit(door)

    async def wait_in(door: AdmissionGate) -> None:
        door.enqueue()

    run(test)


def test_a_successor_clears_the_place_in_the_order_that_a_dead_process_had(gate: Gates) -> None:
    async def test() -> None:
        first, second = gate(0, max_requests=1), gate(1, max_requests=1)
        inside = await admit(first)
        second.enqueue()
        inside.release()
        assert first.try_admit() is None
        gate(1, max_requests=1)
        assert first.try_admit() is not None

    run(test)
