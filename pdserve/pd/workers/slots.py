"""Places for transfers at one prefill.

One below its sender tasks: if all of them waited for prefills that are not finished, those that are could not be sent,
and would keep the blocks that the others need.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable


class Slots:
    """A counter with a queue. A leg that waits is poked when it may have its turn."""

    __slots__ = ("_waiting", "free")

    def __init__(self, transfers: int) -> None:
        self.free = max(1, transfers - 1)
        """Places that are free; not to be changed from outside."""
        self._waiting: deque[Callable[[], None]] = deque()

    def take(self) -> bool:
        if self.free <= 0:
            return False
        self.free -= 1
        return True

    def give(self) -> None:
        self.free += 1
        if self._waiting:
            self._waiting[0]()

    def enqueue(self, poke: Callable[[], None]) -> None:
        self._waiting.append(poke)

    def is_next(self, poke: Callable[[], None]) -> bool:
        return self.free > 0 and bool(self._waiting) and self._waiting[0] is poke

    def dequeue(self, poke: Callable[[], None]) -> None:
        """Leaves the queue, with a place or without; the next one looks for itself."""
        self._waiting.remove(poke)
        if self._waiting and self.free > 0:
            self._waiting[0]()
