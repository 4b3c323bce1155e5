"""The order of one engine's KV event batches: which to apply, and when some were missed.

A publisher numbers its batches from 0. ZMQ drops messages when a subscriber is slow or its connection breaks, and
repeats none; the publisher's replay endpoint has the last ones (10,000 by default).
"""

from __future__ import annotations

from enum import Enum


class Step(Enum):
    """An order about a batch."""

    APPLY = "apply"
    SKIP = "skip"
    """A replay has brought it already."""
    GAP = "gap"
    """Batches before it are missing."""
    RESTART = "restart"
    """The numbers have begun anew: another life of the engine. Forget, then ask again."""


class Feed:
    """Numbers of one publisher. A second life whose numbers have already overtaken those of the first looks like a gap:
    whoever knows of restarts begins a new Feed for each life."""

    __slots__ = ("_live", "expected")

    def __init__(self) -> None:
        self.expected = 0
        """The number that comes next; a replay is asked for from here on."""
        self._live = -1

    def live(self, number: int) -> Step:
        """A batch as it was published."""
        if number <= self._live:
            self.expected = 0
            self._live = -1
            return Step.RESTART
        if number > self.expected:
            return Step.GAP
        self._live = number
        if number < self.expected:
            return Step.SKIP
        self.expected += 1
        return Step.APPLY

    def replayed(self, number: int) -> Step:
        """A batch of a replay: APPLY, SKIP, or GAP when the publisher does not have those before it any more."""
        if number > self.expected:
            return Step.GAP
        if number < self.expected:
            return Step.SKIP
        self.expected += 1
        return Step.APPLY

    def jump(self, number: int, *, live: bool) -> None:
        """Go on with this batch as if nothing had been before it. What was known must have been forgotten."""
        self.expected = number + 1
        if live:
            self._live = number
