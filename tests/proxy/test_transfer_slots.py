"""Places for transfers at one prefill: one count and one order over all processes of the proxy."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from pdserve.pd.processes import shared_numbers
from pdserve.pd.workers import load
from pdserve.pd.workers.load import LoadBoard
from pdserve.pd.workers.slots import Slots

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
        board = LoadBoard(shared_numbers.shared(path, size, process=index, processes=PROCESSES))
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


async def full(first: Slots) -> None:
    assert first.take()
    assert first.take()


def test_places_are_counted_over_all_processes(process: Process) -> None:
    first, second = process(0), process(1)
    assert [slots.take() for slots in (first, second, first, second)] == [True, True, False, False]
    second.give()
    assert (first.free, second.free) == (1, 1)


def test_a_place_that_another_process_gives_back_is_found(process: Process) -> None:
    async def test() -> None:
        first, second = process(0), process(1)
        await full(first)
        waiting = Waiting(second)
        first.give()
        await waiting.has_place.wait()
        assert first.free == 0

    asyncio.run(asyncio.wait_for(test(), 60))


def test_who_came_first_has_the_place_first_whichever_process_it_is_in(process: Process) -> None:
    async def test() -> None:
        first, second = process(0), process(1)
        await full(first)
        earlier, later = Waiting(second), Waiting(first)
        first.give()
        assert not first.take(), "nor does one that comes now"
        await earlier.has_place.wait()
        assert not later.has_place.is_set()
        first.give()
        await later.has_place.wait()

    asyncio.run(asyncio.wait_for(test(), 60))


def test_a_process_that_hangs_is_waited_for_by_nobody(process: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        first, second = process(0), process(1)
        await full(first)
        await asyncio.to_thread(asyncio.run, wait_in(second))  # its loop ends, and looks no more
        first.give()
        assert not first.take()
        monkeypatch.setattr(load, "HEARD_SECONDS", 0.0)
        assert first.take()

    async def wait_in(slots: Slots) -> None:
        Waiting(slots)

    asyncio.run(asyncio.wait_for(test(), 60))


def test_a_successor_gives_back_what_a_dead_process_had_taken(process: Process) -> None:
    first = process(0)
    second = process(1)
    assert second.take()
    assert second.take()
    assert first.free == 0
    process(1)
    assert first.free == 2
