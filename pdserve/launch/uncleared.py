"""What may be left of the last lives of processes: nothing is started again before its stop was answered."""

from __future__ import annotations

import time
from dataclasses import dataclass

from pdserve.run.state import ProcessPhase

ANSWER_SECONDS = 60.0
"""Behind its grace a stop has so long to be answered: the KILL of what cannot end. Then its agent has failed at it, and
the next stop is an order of its own."""


@dataclass
class _Stopping:
    """Stops of one process that its agent has not answered yet: it answers each of them."""

    then: ProcessPhase
    """What the process is once they are answered."""
    until: float
    """When the shortest grace is over (time.monotonic)."""
    orders: int = 1


class Uncleared:
    """Names of processes that were started, or ordered to stop, and whose stop was not answered since. Whatever their
    phase, what is left of them may hold a port or a device."""

    def __init__(self) -> None:
        self._nodes: dict[str, str] = {}
        self._stopping: dict[str, _Stopping] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._nodes

    def started(self, name: str, node: str) -> None:
        """A start was ordered."""
        self._nodes[name] = node

    def order_stop(self, name: str, node: str, grace: float, then: ProcessPhase) -> bool:
        """True: a stop is to be sent. False: one was sent that comes to its end as soon as this one would."""
        until = time.monotonic() + grace
        stopping = self._stopping.get(name)
        if stopping is None or time.monotonic() > stopping.until + ANSWER_SECONDS:
            self._stopping[name] = _Stopping(then, until)
        elif until < stopping.until:
            stopping.until, stopping.orders = until, stopping.orders + 1
        else:
            return False
        self._nodes[name] = node
        return True

    def is_stopping(self, name: str) -> bool:
        """True while a stop is not answered."""
        return name in self._stopping

    def stopped(self, name: str, *, left: bool = False) -> ProcessPhase:
        """A stop was answered, or an agent has stopped it by itself. Returns what the process is now. `left`: something
        of it lives, which no KILL ends: another stop may find that gone."""
        stopping = self._stopping.get(name)
        if stopping is not None and stopping.orders > 1:
            stopping.orders -= 1
            return stopping.then
        if left:
            self._stopping.pop(name, None)
        else:
            self.done(name)
        return "stopped" if stopping is None else stopping.then

    def done(self, name: str) -> None:
        """It has ended by itself, with all that it had to do."""
        self._nodes.pop(name, None)
        self._stopping.pop(name, None)

    def lost(self, node: str) -> None:
        """No agent is left there that would answer; its guard clears up."""
        for name in [name for name, its_node in self._nodes.items() if its_node == node]:
            self.done(name)
