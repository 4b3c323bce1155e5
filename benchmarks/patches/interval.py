"""Hodges and Lehmann's estimate of where a distribution has its middle, and its interval after Wilcoxon.

Of few values, any of which may be far off: neither takes them to be normal, only to lie alike on both sides.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

CONFIDENCE = 0.99
"""High, since many intervals are judged and each is looked at several times."""
FEWEST = 8
"""Values of which there is an interval with this confidence: the least likely order of signs has 2 / 2**8."""


class Interval(NamedTuple):
    low: float | None
    middle: float
    high: float | None


def interval(values: Sequence[float]) -> Interval:
    """Its ends are None with fewer than FEWEST values."""
    walsh = sorted((a + b) / 2 for place, a in enumerate(values) for b in values[place:])
    middle = statistics.median(walsh)
    if len(values) < FEWEST:
        return Interval(None, middle, None)
    outside = _left_out(len(values))
    return Interval(walsh[outside], middle, walsh[-1 - outside])


@cache
def _left_out(number: int) -> int:
    """How many averages of two lie outside at each end: the largest rank sum that the tail still has whole."""
    ways = [1]
    """Rank sum -> sets of signs that have it."""
    for rank in range(1, number + 1):
        ways = [
            (ways[total] if total < len(ways) else 0) + (ways[total - rank] if total >= rank else 0)
            for total in range(len(ways) + rank)
        ]
    allowed, below, total = (1 - CONFIDENCE) / 2 * 2**number, ways[0], 0
    while (below := below + ways[total + 1]) <= allowed:
        total += 1
    return total
