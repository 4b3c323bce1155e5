"""Quotas limit what one API key may use: requests at once, and requests a minute.

The rate is a count over the last 60 seconds, kept for each second, so that no 60 seconds ever have more than the limit.
What has been counted leaves after 60 to 61 seconds, and that is what Retry-After says.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from hashlib import blake2b
from typing import Final, Literal

from pdserve.pd.errors import ApiError
from pdserve.pd.limits.api_keys import ApiKey
from pdserve.pd.limits.cells import Cells, OwnCells, SharedCells
from pdserve.pd.processes.shared_numbers import Numbers

WINDOW_SECONDS: Final = 60
_SECONDS: Final = WINDOW_SECONDS + 1
"""Counts kept: the running second and those that are not yet 60 s old at its end."""
_RATE_CELLS: Final = _SECONDS + 2
_IN_FLIGHT: Final = 1 + _RATE_CELLS
"""The first place of the requests in flight, in the row of a key."""
MAX_KEYS: Final = 1024
"""Keys that can have limits of their own where several processes share the counts; further ones share the last row."""

Limit = Literal["max_requests", "requests_per_minute"]


def cells_needed(processes: int) -> int:
    """Return shared numbers that Quotas takes."""
    return MAX_KEYS * _row_cells(processes)


def _row_cells(processes: int) -> int:
    return _IN_FLIGHT + processes


class _Rate:
    """A count over the last 60 s, in `cells` from `first` on: one for each second of a ring, the total, and the last
    second seen."""

    __slots__ = ("_cells", "_first", "_last", "_total")

    def __init__(self, cells: Cells, first: int) -> None:
        self._cells = cells
        self._first, self._total, self._last = first, first + _SECONDS, first + _SECONDS + 1

    def total(self, second: int) -> float:
        """Return what counts at a second."""
        if second > self._cells.get(self._last):
            self._advance(second)
        return self._cells.get(self._total)

    def add_one(self, second: int) -> None:
        """Count one at a second, after `total`."""
        self._cells.add(self._first + second % _SECONDS, 1.0)
        self._cells.add(self._total, 1.0)

    def _advance(self, second: int) -> None:
        cells, first = self._cells, self._first
        last = int(cells.get(self._last))
        if second - last >= _SECONDS:
            for place in range(first, first + _SECONDS):
                cells.put(place, 0.0)
            cells.put(self._total, 0.0)
        else:
            for old in range(last + 1, second + 1):
                place = first + old % _SECONDS
                cells.add(self._total, -cells.get(place))
                cells.put(place, 0.0)
        cells.put(self._last, float(second))

    def free_in(self, wanted: float, second: int) -> int:
        """Return the whole seconds from the start of `second` until at most `wanted` is counted."""
        left = self.total(second)
        for age in range(WINDOW_SECONDS, -1, -1):
            left -= self._cells.get(self._first + (second - age) % _SECONDS)
            if left <= wanted:
                return _SECONDS - age
        return _SECONDS


class _Row:
    """The counts of one key: its mark, its rate, and the requests in flight of each process."""

    __slots__ = ("_cells", "_own", "requests")

    def __init__(self, cells: Cells, process: int) -> None:
        self.requests = _Rate(cells, 1)
        self._cells = cells
        self._own = _IN_FLIGHT + process

    @property
    def in_flight(self) -> float:
        """Return the requests in flight, over all processes."""
        return self._cells.total(_IN_FLIGHT, 1)

    def add_request(self, count: int) -> None:
        """Add to what this process has in flight. Needs no lock: only this process changes that number."""
        self._cells.add(self._own, float(count))


class QuotaUse:
    """The share of a quota that one request has taken, until `end`."""

    __slots__ = ("_row",)

    def __init__(self, row: _Row | None) -> None:
        """Count in the row of a key. `row` None: nothing is counted."""
        self._row = row

    def end(self) -> None:
        """Count the request as over. A second time does nothing."""
        row, self._row = self._row, None
        if row is not None:
            row.add_request(-1)


_UNLIMITED: Final = QuotaUse(None)


class Quotas:
    """The counts of all keys, over all processes. They outlive a reload of the keys: a row belongs to a name."""

    def __init__(self, numbers: Numbers, clock: Callable[[], float] = time.monotonic) -> None:
        """Take the cells of all keys. `clock`: seconds, the same in all processes."""
        self.rejected: dict[tuple[str, Limit], int] = {}
        """Requests turned away, by key and limit."""
        self._numbers = numbers
        self._clock = clock
        self._row_cells = _row_cells(numbers.processes)
        self._cells = numbers.take(cells_needed(numbers.processes))
        self._rows: dict[str, _Row] = {}
        for index in range(MAX_KEYS):
            # What a process of this index that died had in flight.
            self._cells[(index + 1) * self._row_cells - numbers.processes + numbers.process] = 0

    def enter(self, key: ApiKey) -> QuotaUse:
        """Count a request. Raises ApiError 429 with Retry-After when a limit is reached: then nothing is counted."""
        if not key.limited:
            return _UNLIMITED
        row = self._rows.get(key.name)
        if row is None:
            row = self._rows[key.name] = self._find_row(key.name)
        now = self._clock()
        second = int(now)
        with self._numbers.lock:
            if key.max_requests is not None and row.in_flight >= key.max_requests:
                raise self._refusal(key, "max_requests", f"{key.max_requests} requests at once", 1)
            requests, most = row.requests.total(second), key.requests_per_minute
            if most is not None and requests >= most:
                wait = math.ceil(row.requests.free_in(most - 1, second) - (now - second))
                raise self._refusal(key, "requests_per_minute", f"{most} requests a minute", wait)
            # Counted also where there is no limit now: a reload can bring one.
            row.requests.add_one(second)
            row.add_request(1)
        return QuotaUse(row)

    def in_flight(self, name: str) -> int:
        """Return the requests of a key, over all processes."""
        row = self._rows.get(name)
        return int(row.in_flight) if row is not None else 0

    def _refusal(self, key: ApiKey, limit: Limit, what: str, seconds: int) -> ApiError:
        self.rejected[key.name, limit] = self.rejected.get((key.name, limit), 0) + 1
        return ApiError(429, f"The limit of this API key is {what}.", retry_after=max(seconds, 1))

    def _find_row(self, name: str) -> _Row:
        """Return the row that has the name's hash, or the first free one."""
        # 52 bits: exact in a double, and never 0.
        mark = float((int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little") >> 12) | 1)
        with self._numbers.lock:
            for index in range(MAX_KEYS):
                start = index * self._row_cells
                if self._cells[start] in (0, mark) or index == MAX_KEYS - 1:
                    self._cells[start] = mark
                    if self._numbers.processes == 1:
                        # Kept for as long as this process lives, which is as long as its shared numbers.
                        return _Row(OwnCells(self._row_cells), 0)
                    cells = SharedCells(self._cells[start : start + self._row_cells])
                    return _Row(cells, self._numbers.process)
        raise AssertionError("unreachable")
