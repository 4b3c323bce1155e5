"""The choice by who holds most of the prompt, shared by the approximate and the exact policy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from pdserve.pd.routing.ask import RoutingRequest
from pdserve.pd.routing.burden import Burden
from pdserve.pd.routing.policy import Choice, W

MATCH: Final = "match"  # holds most of the prompt, and is not too busy
NO_MATCH: Final = "no_match"  # no worker holds enough of it: the least loaded
OVERLOADED: Final = "overloaded"  # the worker that holds most of it is too busy: the least loaded
BY_MATCH: Final = (MATCH, NO_MATCH, OVERLOADED)


def by_match(
    candidates: Sequence[W], held: list[int], burden: Burden, ask: RoutingRequest, min_ratio: float
) -> Choice[W]:
    """The least loaded of those that hold most of the prompt, unless that is too little of it, or they are too busy.
    `held`: tokens of it that each candidate holds."""
    most = 0
    for tokens in held:
        if tokens > most:
            most = tokens
    if not most or most < min_ratio * ask.estimate:
        return Choice(burden.least(candidates), NO_MATCH)
    best = [candidate for place, candidate in enumerate(candidates) if held[place] == most]
    if len(best) < len(candidates):
        calm = burden.calmest(candidates)
        if held[calm] < most and burden.too_busy(best[burden.calmest(best)], candidates[calm], saved=most - held[calm]):
            return Choice(burden.least(candidates), OVERLOADED)
    return Choice(burden.least(best), MATCH)
