"""Decide who may enter a pool now, who waits, and who is turned away.

A gate for each pool: limits of requests and prompt tokens in flight for each ready worker, and of KV use. Whoever does
not fit waits in a bounded queue, by priority and within one priority in order of arrival; no request is overtaken by a
request of the same or a worse priority, also not by a smaller one. With several proxy processes each has a queue of its
own, while limits and order hold over all of them, the order of arrival to a tenth of a second: each shows the others
who is first in its queue, and looks often at what they show. A process that is not heard of is waited for by nobody.
"""

from __future__ import annotations

import asyncio
import math
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Final, Protocol

from pdserve.pd.config.settings import PoolLimits
from pdserve.pd.errors import ApiError
from pdserve.pd.limits.cells import Cells, OwnCells, SharedCells
from pdserve.pd.processes.shared_numbers import APART_SECONDS, HEARD_SECONDS, LOOK_SECONDS, Numbers

CELLS_PER_PROCESS: Final = 6
"""Shared numbers that a gate takes, for each process: requests and prompt tokens in flight, and what follows."""
_PRIORITY, _SINCE, _HEARD, _MOST = 2, 3, 4, 5
"""Of the first in its queue, with the time of its arrival (0: nobody waits); when the process last looked; and how many
requests in flight keep it out. Times are those of time.monotonic(), the same in all processes."""
MAX_PRIORITY: Final = 1_000_000
_UNLIMITED: Final = math.inf
_COUNTABLE: Final = 1 << 53


class AdmissionCandidate(Protocol):
    """A ready worker, as far as a gate looks at it."""

    @property
    def kv_usage(self) -> float:
        """Return how full the worker's KV cache is: 0..1; 0 while unknown."""


class Ticket:
    """A place in a pool, until `release`."""

    __slots__ = ("_gate", "tokens")

    def __init__(self, gate: AdmissionGate, tokens: int) -> None:
        self._gate: AdmissionGate | None = gate
        self.tokens = tokens

    def release(self) -> None:
        """Give the place back; a second time does nothing."""
        gate, self._gate = self._gate, None
        if gate is not None:
            gate._leave(self.tokens)


class QueuedRequest:
    """One request in the queue."""

    __slots__ = ("future", "priority", "since", "timer", "tokens")

    def __init__(self, priority: int, tokens: int, future: asyncio.Future[Ticket]) -> None:
        self.priority = priority
        self.tokens = tokens
        self.since = monotonic()
        self.future = future
        self.timer: asyncio.TimerHandle | None = None


class AdmissionGate:
    """The entrance of one pool. Belongs to one event loop.

    `candidates` gives the pool's ready workers, `no_worker` the error when there is none. `refresh` must be called when
    they change (ready, dead, a new figure of KV use).
    """

    def __init__(
        self,
        pool: str,
        limits: PoolLimits,
        candidates: Callable[[], Sequence[AdmissionCandidate]],
        numbers: Numbers,
        no_worker: Callable[[], ApiError],
    ) -> None:
        self.pool = pool
        self.rejected_full = 0
        """Requests turned away at once, or pushed out of a full queue by a better priority."""
        self.rejected_late = 0
        """Requests whose time in the queue was over."""
        self.waiting = 0
        self._limits = limits
        self._candidates = candidates
        self._no_worker = no_worker
        shared = numbers.take(CELLS_PER_PROCESS * numbers.processes)
        self._lock = numbers.lock
        self._shared = numbers.processes > 1
        self._cells: Cells = SharedCells(shared) if self._shared else OwnCells(CELLS_PER_PROCESS)
        self._all_cells = len(shared)
        self._own = CELLS_PER_PROCESS * numbers.process
        for index in range(CELLS_PER_PROCESS):
            # What a process of this index that died had counted.
            self._cells.put(self._own + index, 0.0)
        self._look_again: asyncio.TimerHandle | None = None
        self._others = 0.0
        """Requests in flight of other processes, at the last look."""
        self._left_over = 0
        """The number of those that the last figure of KV use lets in: the others were first."""
        self._queues: dict[int, OrderedDict[QueuedRequest, None]] = {}
        self._priorities: list[int] = []
        self._interval = 0.0
        self._last_turn = 0.0
        self._max_requests = self._max_tokens = _UNLIMITED
        self._kv_open = True
        self._workers = 0
        self.refresh()

    @property
    def requests(self) -> int:
        """Return the requests in flight, over all processes."""
        return int(self._cells.total(0, CELLS_PER_PROCESS))

    @property
    def tokens(self) -> int:
        """Return the prompt tokens in flight, over all processes."""
        return int(self._cells.total(1, CELLS_PER_PROCESS))

    def configure(self, limits: PoolLimits) -> None:
        """Take other limits from now on; who is in stays in."""
        self._limits = limits
        self.refresh()

    def refresh(self) -> None:
        """Look at the pool again, and let in who fits now. With no worker left, no request waits on."""
        workers = self._candidates()
        limits, self._workers = self._limits, len(workers)
        self._max_requests = _limit(limits.max_requests, self._workers)
        self._max_tokens = _limit(limits.max_prompt_tokens_in_flight, self._workers)
        uncrowded = self._workers
        if limits.max_kv_usage is not None:
            uncrowded = sum(worker.kv_usage < limits.max_kv_usage for worker in workers)
        self._kv_open = uncrowded > 0
        if not self.waiting:
            return
        if not workers:
            self._dismiss_all()
        else:
            # What a request will take of the KV cache shows late: one more for each worker and new figure, besides one
            # for each that leaves, and not the whole queue at once.
            most = self.waiting if limits.max_kv_usage is None else max(uncrowded, 1)
            if self._shared:
                self._show_first()  # also how full this process takes the pool for
            self._left_over = most - self._let_in(most)

    def try_admit(self, priority: int = 0, tokens: int = 0) -> Ticket | None:
        """Return a ticket if there is room and no request is before this one. Never waits."""
        if self.waiting and self._priorities[0] <= priority:
            return None
        if (self._shared and self._other_is_first(priority, monotonic())) or not self._enter(tokens):
            return None
        return Ticket(self, tokens)

    def turns_away(self, priority: int = 0, tokens: int = 0) -> bool:
        """Tell whether there is neither room now nor a place in the queue."""
        if self.waiting < self._limits.queue_size or (self._priorities and self._priorities[-1] > priority):
            return False
        return bool(self._priorities) or not self._fits(tokens)

    def enqueue(self, priority: int = 0, tokens: int = 0) -> QueuedRequest:
        """Take a place in the queue. Raises ApiError 429 when that is full. Whoever waits for its future gets a ticket,
        or the ApiError that ends the wait, and must call `left` if it is cancelled."""
        if self.waiting >= self._limits.queue_size:
            self._make_place(priority)
        loop = asyncio.get_running_loop()
        waiter = QueuedRequest(priority, tokens, loop.create_future())
        self._add(waiter)
        waiter.timer = loop.call_later(self._limits.queue_seconds, self._too_late, waiter)
        return waiter

    def left(self, waiter: QueuedRequest) -> None:
        """Forget a request whose wait was cancelled."""
        if waiter.future.cancelled():
            self._dequeue(waiter)
            self._let_in_next()
        elif waiter.future.exception() is None:
            # Let in and cancelled in the same turn of the loop.
            waiter.future.result().release()

    def retry_after(self) -> int:
        """Return the whole seconds after which a place in the queue is likely: its length at the pace of the last
        turns."""
        pace = self._interval * (self.waiting + 1)
        return max(1, min(math.ceil(pace), math.ceil(self._limits.queue_seconds)))

    def _fits(self, tokens: int) -> bool:
        requests = self._cells.total(0, CELLS_PER_PROCESS)
        if not requests or not self._workers:
            # An idle pool takes anything: gauges of an idle engine are old, and a prompt over the limit must come in
            # at some time. Of an empty pool the router speaks.
            return True
        if requests >= self._max_requests or not self._kv_open:
            return False
        if self._max_tokens == _UNLIMITED:
            return True
        flying = self._cells.total(1, CELLS_PER_PROCESS)
        return flying == 0 or flying + tokens <= self._max_tokens

    def _enter(self, tokens: int) -> bool:
        with self._lock:
            if not self._fits(tokens):
                return False
            self._cells.add(self._own, 1.0)
            self._cells.add(self._own + 1, float(tokens))
            return True

    def _leave(self, tokens: int) -> None:
        # Without the lock: only this process changes its cells. The tokens go first, or another process could find no
        # request in flight, take the pool for idle and let in any prompt beside tokens that still count.
        self._cells.add(self._own + 1, -float(tokens))
        self._cells.add(self._own, -1.0)
        if self.waiting:
            self._let_in_next()

    def _let_in_next(self) -> None:
        """Let in whom there is room for after one has left the pool or the queue. With a limit of tokens, that can make
        room for several."""
        paced = self._max_tokens == _UNLIMITED or self._limits.max_kv_usage is not None
        self._let_in(1 if paced else self.waiting)

    def _let_in(self, most: int) -> int:
        """Let in those who are first and fit, up to `most`; return how many there were."""
        entered = 0
        while entered < most and self.waiting:
            waiter = next(iter(self._queues[self._priorities[0]]))
            if waiter.future.done():  # cancelled, and not yet gone
                self._dequeue(waiter)
                continue
            if (self._shared and self._other_is_first(waiter.priority, waiter.since)) or not self._enter(waiter.tokens):
                break
            entered += 1
            self._dequeue(waiter)
            now = waiter.future.get_loop().time()
            if self._last_turn:
                self._interval += 0.2 * (min(now - self._last_turn, self._limits.queue_seconds) - self._interval)
            self._last_turn = now if self.waiting else 0.0
            waiter.future.set_result(Ticket(self, waiter.tokens))
        return entered

    def _make_place(self, priority: int) -> None:
        """Make room in a full queue, at the cost of the last request with a worse priority. Raises ApiError if there is
        none."""
        self.rejected_full += 1
        if not self._priorities or self._priorities[-1] <= priority:
            raise self._busy("and its queue is full")
        last = next(reversed(self._queues[self._priorities[-1]]))
        self._turn_away(last, self._busy("and requests of a better priority fill its queue"))

    def _too_late(self, waiter: QueuedRequest) -> None:
        if not waiter.future.done():
            self.rejected_late += 1
            why = f"and for {self._limits.queue_seconds:g} s no place has become free"
            self._turn_away(waiter, self._busy(why))
            self._let_in_next()

    def _dismiss_all(self) -> None:
        for waiter in [waiter for queue in self._queues.values() for waiter in queue]:
            self._turn_away(waiter, self._no_worker())

    def _turn_away(self, waiter: QueuedRequest, error: ApiError) -> None:
        self._dequeue(waiter)
        if not waiter.future.done():
            waiter.future.set_exception(error)

    def _add(self, waiter: QueuedRequest) -> None:
        queue = self._queues.get(waiter.priority)
        if queue is None:
            queue = self._queues[waiter.priority] = OrderedDict()
            insort(self._priorities, waiter.priority)
        queue[waiter] = None
        self.waiting += 1
        if self._shared:
            self._show_first()
            if self._look_again is None:
                self._others = self._others_in_flight()
                self._look_again = waiter.future.get_loop().call_later(LOOK_SECONDS, self._look)

    def _dequeue(self, waiter: QueuedRequest) -> None:
        queue = self._queues.get(waiter.priority)
        if queue is None or waiter not in queue:
            return
        del queue[waiter]
        if not queue:
            del self._queues[waiter.priority]
            del self._priorities[bisect_left(self._priorities, waiter.priority)]
        self.waiting -= 1
        if self._shared:
            self._show_first()

    # --- beside other processes

    def _others_in_flight(self) -> float:
        return self._cells.total(0, CELLS_PER_PROCESS) - self._cells.get(self._own)

    def _show_first(self) -> None:
        own = self._own
        if not self.waiting:
            self._cells.put(own + _SINCE, 0.0)
            return
        first = next(iter(self._queues[self._priorities[0]]))
        self._cells.put(own + _PRIORITY, float(first.priority))
        self._cells.put(own + _SINCE, first.since)
        self._cells.put(own + _HEARD, monotonic())
        self._cells.put(own + _MOST, self._max_requests if self._kv_open else 0.0)

    def _other_is_first(self, priority: int, since: float) -> bool:
        """Tell whether another process has a request that is before this one, and that could enter as that process sees
        the pool: what it alone takes for full holds up nobody else."""
        cells = self._cells
        for other in range(0, self._all_cells, CELLS_PER_PROCESS):
            arrived = cells.get(other + _SINCE)
            if (
                arrived
                and other != self._own
                and (cells.get(other + _PRIORITY), arrived + APART_SECONDS) < (priority, since)
                and monotonic() - cells.get(other + _HEARD) < HEARD_SECONDS
                and self.requests < cells.get(other + _MOST)
            ):
                return True
        return False

    def _look(self) -> None:
        """Look, while a request waits, at what other processes have freed, and whether it is first by now."""
        self._look_again = None
        if not self.waiting:
            return
        self._show_first()
        before, self._others = self._others, self._others_in_flight()
        if self._limits.max_kv_usage is None:
            self._let_in(self.waiting)
        else:
            most = self._left_over + max(0, int(before - self._others))
            self._left_over = min(self._left_over, most - self._let_in(most))
        if self.waiting and self._look_again is None:
            self._look_again = asyncio.get_running_loop().call_later(LOOK_SECONDS, self._look)

    def _busy(self, why: str) -> ApiError:
        return ApiError(429, f"The {self.pool} pool is busy, {why}.", retry_after=self.retry_after())


def _limit(each: int | None, workers: int) -> float:
    """Return the limit of a pool. A number that no float holds is none."""
    return _UNLIMITED if each is None or each > _COUNTABLE else float(each * workers)
