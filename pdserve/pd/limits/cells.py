"""Places that a limit is counted in: those of one process, or shared by all processes of a proxy."""

from __future__ import annotations


class Cells:
    """Holds numbers by their place. It is the base class of the two below: compiled, a call of either needs no look-up,
    and a number no object."""

    __slots__ = ()

    def get(self, place: int) -> float:
        raise NotImplementedError

    def put(self, place: int, value: float) -> None:
        raise NotImplementedError

    def add(self, place: int, amount: float) -> None:
        raise NotImplementedError

    def total(self, first: int, step: int) -> float:
        """Return the sum of every `step`th from `first` on."""
        raise NotImplementedError


class OwnCells(Cells):
    """Numbers of the only process."""

    __slots__ = ("_numbers",)

    def __init__(self, count: int) -> None:
        self._numbers = [0.0] * count

    def get(self, place: int) -> float:
        return self._numbers[place]

    def put(self, place: int, value: float) -> None:
        self._numbers[place] = value

    def add(self, place: int, amount: float) -> None:
        self._numbers[place] += amount

    def total(self, first: int, step: int) -> float:
        counted, place = 0.0, first
        while place < len(self._numbers):
            counted += self._numbers[place]
            place += step
        return counted


class SharedCells(Cells):
    """Numbers of several processes (processes.shared_numbers)."""

    __slots__ = ("_numbers",)

    def __init__(self, numbers: memoryview[float]) -> None:
        self._numbers = numbers

    def get(self, place: int) -> float:
        return self._numbers[place]

    def put(self, place: int, value: float) -> None:
        self._numbers[place] = value

    def add(self, place: int, amount: float) -> None:
        self._numbers[place] += amount

    def total(self, first: int, step: int) -> float:
        return sum(self._numbers[first::step])
