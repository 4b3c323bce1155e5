"""Places for transfers at one prefill, over all processes of the proxy.

One below its sender tasks: if all of them waited for prefills that are not finished, those that are could not be sent,
and would keep the blocks that the others need.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from time import monotonic
from typing import Final

from pdserve.pd.processes.shared_numbers import LOOK_SECONDS
from pdserve.pd.workers.load import WorkerLoad

Poke = Callable[[], None]
_NOBODY: Final = 0.0


class Slots:
    """A count with a queue. A leg that waits is poked when it may have its turn: at once when this process gives a
    place back, within LOOK_SECONDS when another one does."""

    __slots__ = ("_load", "_look_again", "_most", "_waiting")

    def __init__(self, load: WorkerLoad, transfers: int) -> None:
        """`load`: where the places are counted. `transfers`: sender tasks of the prefill."""
        self._load = load
        self._most = max(1, transfers - 1)
        self._waiting: deque[tuple[float, Poke]] = deque()
        """With the time.monotonic() of their arrival."""
        self._look_again: asyncio.TimerHandle | None = None

    @property
    def free(self) -> int:
        """Places that are free."""
        return self._most - self._load.transfers

    def take(self) -> bool:
        """Take a place, unless somebody waits for it; else `enqueue`."""
        load = self._load
        if self._waiting or (load.shared and load.others_wait(monotonic())):
            return False
        return load.begin_transfer(self._most)

    def give(self) -> None:
        self._load.end_transfer()
        self._poke_first()

    def enqueue(self, poke: Poke) -> None:
        self._waiting.append((monotonic(), poke))
        if self._load.shared and self._look_again is None:
            self._look()

    def is_next(self, poke: Poke) -> bool:
        """Its turn has come: `take_turn`."""
        if not self._waiting or self.free <= 0:
            return False
        since, first = self._waiting[0]
        return first is poke and not self._load.others_wait(since)

    def take_turn(self) -> bool:
        """The first in the queue takes its place; False: another process was quicker."""
        return self._load.begin_transfer(self._most)

    def dequeue(self, poke: Poke) -> None:
        """Leaves the queue, with a place or without; the next one looks for itself."""
        for place, (_, waiting) in enumerate(self._waiting):
            if waiting is poke:
                del self._waiting[place]
                break
        self._show_first()
        self._poke_first()

    def _poke_first(self) -> None:
        if self._waiting and self.free > 0:
            self._waiting[0][1]()

    def _show_first(self) -> None:
        self._load.show_waiting(self._waiting[0][0] if self._waiting else _NOBODY)

    def _look(self) -> None:
        """While a leg waits, at the places that other processes have given back."""
        self._look_again = None
        self._show_first()
        if self._waiting:
            self._look_again = asyncio.get_running_loop().call_later(LOOK_SECONDS, self._look)
            self._poke_first()
