"""Limit how often the page of figures is made: it takes 2 ms of the event loop, and a client needs no key to ask for
it."""

from __future__ import annotations

import time
from collections.abc import Callable

FRESH_A_SECOND = 20
"""Each made anew; who asks more often gets the last one."""


class PageLimit:
    def __init__(self, make: Callable[[], bytes], clock: Callable[[], float] = time.monotonic) -> None:
        self._make, self._clock = make, clock
        self._page = b""
        self._second, self._made = 0, FRESH_A_SECOND

    def page(self) -> bytes:
        second = int(self._clock())
        if second != self._second:
            self._second, self._made = second, 0
        if self._made < FRESH_A_SECOND:
            self._made += 1
            self._page = self._make()
        return self._page
