"""How long the place of a proxy's process stays empty after its end."""

from __future__ import annotations

from pdserve.pd.processes.pauses import Pauses


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def lived(pauses: Pauses, clock: Clock, seconds: float) -> float:
    """The pause after a life of so many seconds; it is waited for."""
    pauses.begun(0)
    clock.now += seconds
    pause = pauses.ended(0)
    clock.now += pause
    return pause


def test_the_pause_doubles_with_each_short_life_and_has_a_limit() -> None:
    clock = Clock()
    pauses = Pauses(clock)
    assert [lived(pauses, clock, 0.1) for _ in range(10)] == [0, 0.5, 1, 2, 4, 8, 16, 30, 30, 30]
    assert [lived(pauses, clock, 0.1) for _ in range(1100)][-1] == 30


def test_after_a_long_life_it_begins_anew() -> None:
    clock = Clock()
    pauses = Pauses(clock)
    assert [lived(pauses, clock, seconds) for seconds in (1, 1, 1, 60, 1, 1)] == [0, 0.5, 1, 0, 0, 0.5]


def test_a_place_is_due_when_its_pause_is_over_and_until_it_is_filled() -> None:
    clock = Clock()
    pauses = Pauses(clock)
    assert (pauses.due(), pauses.left()) == ([], None)
    for _ in range(2):
        pauses.begun(3)
        pauses.ended(3)
    assert (pauses.due(), pauses.left()) == ([], 0.5)
    clock.now += 0.75
    assert (pauses.due(), pauses.left()) == ([3], 0)
    pauses.begun(3)
    assert (pauses.due(), pauses.left()) == ([], None)
    pauses.ended(3)
    pauses.forget()
    assert (pauses.due(), pauses.left()) == ([], None)


def test_one_that_an_earlier_program_had_started_has_lived_long() -> None:
    pauses = Pauses(Clock())
    assert pauses.ended(0) == 0
