"""Decide how long the place of a process that has ended stays empty: one that serves and ends at once, again and again,
must not keep its parent busy with forks."""

from __future__ import annotations

import time
from collections.abc import Callable

_SHORT_SECONDS = 10.0
"""A life that is shorter is no sign that the next one will do better."""
_FIRST_SECONDS = 0.5
_LONGEST_SECONDS = 30.0


class Pauses:
    """Pauses of the places of all processes. The first short life costs nothing; from the second in a row on the pause
    doubles."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._begun: dict[int, float] = {}
        self._short: dict[int, int] = {}
        self._until: dict[int, float] = {}

    def begun(self, index: int) -> None:
        """A process has begun."""
        self._begun[index] = self._clock()
        self._until.pop(index, None)

    def ended(self, index: int) -> float:
        """It has ended. Seconds after which `due` names its place."""
        now = self._clock()
        lived = now - self._begun.get(index, 0.0)  # one of the program before had begun long ago
        short = self._short[index] = self._short.get(index, 0) + 1 if lived < _SHORT_SECONDS else 0
        seconds = 0.0 if short < 2 else min(_LONGEST_SECONDS, _FIRST_SECONDS * 2.0 ** (min(short, 32) - 2))
        self._until[index] = now + seconds
        return seconds

    def due(self) -> list[int]:
        """Places whose pause is over."""
        return [index for index, until in self._until.items() if until <= self._clock()]

    def forget(self) -> None:
        """No place waits any more."""
        self._until.clear()

    def left(self) -> float | None:
        """Seconds until a place is due; None: there is none."""
        return max(0.0, min(self._until.values()) - self._clock()) if self._until else None
