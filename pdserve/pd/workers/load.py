"""Count how much each worker has to do, over all processes of the proxy: each has its own row, each process adds them
up.

A row has one writer, so no lock is needed to count, but for a limit over all rows; a process that died leaves a row
that its successor clears. Which row is whose all processes read from one place: they hear of workers at different
times, and one that is new hears nothing of those that are gone. A proxy of one process just counts: routing reads these
figures several times a request.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from hashlib import blake2b
from time import monotonic
from typing import Final

from pdserve.pd.processes.shared_numbers import APART_SECONDS, HEARD_SECONDS, Numbers

MAX_WORKERS: Final = 256
_FIELDS: Final = 5
_TRANSFERS, _SINCE, _HEARD = 2, 3, 4
"""Places for requests and prompt tokens in flight come first. Then transfers; when the first request that waits for a
transfer came (0: none waits); and when its process last looked. Times are those of time.monotonic()."""
_ROW: Final = MAX_WORKERS * _FIELDS


class WorkerLoad:
    """The figures of one worker. Base class of the two below."""

    __slots__ = ()

    @property
    def requests(self) -> int:
        """Legs in flight."""
        raise NotImplementedError

    @property
    def prompt_tokens(self) -> int:
        """Estimated tokens of prompts in flight that are not prefilled yet."""
        raise NotImplementedError

    def add_request(self, count: int) -> None:
        raise NotImplementedError

    def add_prompt_tokens(self, count: int) -> None:
        raise NotImplementedError

    @property
    def shared(self) -> bool:
        """Other processes count here too."""
        raise NotImplementedError

    @property
    def transfers(self) -> int:
        """Places for transfers that are taken (workers.slots)."""
        raise NotImplementedError

    def begin_transfer(self, most: int) -> bool:
        """Count one more, if there are fewer than `most`; whether it is counted."""
        raise NotImplementedError

    def end_transfer(self) -> None:
        raise NotImplementedError

    def show_waiting(self, since: float) -> None:
        """Let the other processes see when the first request of this one came that waits for a transfer; 0: none
        waits. Whoever waits must show it again within HEARD_SECONDS."""
        raise NotImplementedError

    def others_wait(self, since: float) -> bool:
        """A request of another process waits for a transfer, and came before one that came at `since`."""
        raise NotImplementedError


class _Own(WorkerLoad):
    """The load of a worker, as the only process sees it."""

    __slots__ = ("_prompt_tokens", "_requests", "_transfers")

    def __init__(self) -> None:
        self._requests = self._prompt_tokens = self._transfers = 0

    @property
    def requests(self) -> int:
        return self._requests

    @property
    def prompt_tokens(self) -> int:
        return self._prompt_tokens

    def add_request(self, count: int) -> None:
        self._requests += count

    def add_prompt_tokens(self, count: int) -> None:
        self._prompt_tokens += count

    @property
    def shared(self) -> bool:
        return False

    @property
    def transfers(self) -> int:
        return self._transfers

    def begin_transfer(self, most: int) -> bool:
        if self._transfers >= most:
            return False
        self._transfers += 1
        return True

    def end_transfer(self) -> None:
        self._transfers -= 1

    def show_waiting(self, since: float) -> None:
        """Nobody looks."""

    def others_wait(self, since: float) -> bool:
        return False


class _Shared(WorkerLoad):
    """The load of a worker, as one of several processes sees it."""

    __slots__ = ("_cells", "_first", "_lock", "_mine")

    def __init__(
        self, cells: memoryview[float], lock: AbstractContextManager[object], process: int, index: int
    ) -> None:
        self._cells = cells
        self._lock = lock
        self._first = index * _FIELDS
        self._mine = process * _ROW + self._first

    @property
    def requests(self) -> int:
        return int(sum(self._cells[self._first :: _ROW]))

    @property
    def prompt_tokens(self) -> int:
        return int(sum(self._cells[self._first + 1 :: _ROW]))

    def add_request(self, count: int) -> None:
        self._cells[self._mine] += count

    def add_prompt_tokens(self, count: int) -> None:
        self._cells[self._mine + 1] += count

    @property
    def shared(self) -> bool:
        return True

    @property
    def transfers(self) -> int:
        return int(sum(self._cells[self._first + _TRANSFERS :: _ROW]))

    def begin_transfer(self, most: int) -> bool:
        with self._lock:
            if self.transfers >= most:
                return False
            self._cells[self._mine + _TRANSFERS] += 1
            return True

    def end_transfer(self) -> None:
        self._cells[self._mine + _TRANSFERS] -= 1

    def show_waiting(self, since: float) -> None:
        self._cells[self._mine + _SINCE] = since
        self._cells[self._mine + _HEARD] = monotonic()

    def others_wait(self, since: float) -> bool:
        cells, first, mine = self._cells, self._first, self._mine
        for other in range(first, len(cells), _ROW):
            arrived = cells[other + _SINCE]
            if (
                arrived
                and other != mine
                and arrived + APART_SECONDS < since
                and monotonic() - cells[other + _HEARD] < HEARD_SECONDS
            ):
                return True
        return False


class LoadBoard:
    """All workers' figures, as one process sees and writes them."""

    def __init__(self, numbers: Numbers) -> None:
        self._process, self._alone = numbers.process, numbers.processes == 1
        cells = numbers.take(self.cells(numbers.processes))
        self._owners = cells[: 0 if self._alone else MAX_WORKERS]
        """Whose each row is, by the digest of its name; negative: it was removed, 0: nobody's yet."""
        self._cells = cells[len(self._owners) :]
        self._lock = numbers.lock
        self._own: dict[str, _Own] = {}
        if not self._alone:
            for index in range(_ROW):
                self._cells[self._process * _ROW + index] = 0

    @staticmethod
    def cells(processes: int) -> int:
        """Return how many numbers a board takes."""
        return 0 if processes == 1 else MAX_WORKERS + _ROW * processes

    def worker(self, name: str) -> WorkerLoad:
        """Return a worker's load: the same row in every process, whenever that hears of the worker. ValueError: there
        are too many."""
        if self._alone:
            return self._own.setdefault(name, _Own())
        owner = _digest(name)
        with self._lock:
            owners = list(self._owners)
            for taken in (owner, -owner, 0.0):
                if taken in owners:
                    return self._given(owners.index(taken), owner)
            # As late as possible: legs that still run to the one before count there until they end.
            removed = [row for row, former in enumerate(owners) if former < 0]
            if not removed:
                raise ValueError(f"more than {MAX_WORKERS} workers")
            return self._given(min(removed, key=self._requests), owner)

    def remove(self, name: str) -> None:
        """Its row is for another worker, as late as possible. Legs that still run there end as if it had died, and each
        process takes back what it has counted."""
        if self._alone:
            self._own.pop(name, None)
            return
        owner = _digest(name)
        with self._lock:
            owners = list(self._owners)
            if owner in owners:
                self._owners[owners.index(owner)] = -owner

    def _requests(self, row: int) -> int:
        return _Shared(self._cells, self._lock, self._process, row).requests

    def _given(self, row: int, owner: float) -> WorkerLoad:
        self._owners[row] = owner
        return _Shared(self._cells, self._lock, self._process, row)


def _digest(name: str) -> float:
    """A number that a cell holds exactly."""
    return float(int.from_bytes(blake2b(name.encode(), digest_size=6).digest(), "big") + 1)
