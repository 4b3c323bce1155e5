"""power_of_two: the less loaded of two at random.

Nearly as even as least_loaded, without its herd: where several proxies see load figures that are a moment old, they do
not all send to the same worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import ClassVar, Final

from pdserve.pd.routing.ask import RoutingRequest
from pdserve.pd.routing.burden import Burden
from pdserve.pd.routing.policy import Choice, RoutingCandidate, W

POWER_OF_TWO: Final = "power_of_two"


class PowerOfTwo:
    """Draws two different candidates; of equals the first drawn."""

    name = "power_of_two"
    needs_tokens = False
    reasons: ClassVar[tuple[str, ...]] = (POWER_OF_TWO,)

    def __init__(self, burden: Burden, random: Random) -> None:
        self._burden = burden
        self._random = random

    def choose(self, candidates: Sequence[W], ask: RoutingRequest) -> Choice[W]:
        count = len(candidates)
        first = int(self._random.random() * count)
        if count == 1:
            return Choice(candidates[0], POWER_OF_TWO)
        second = int(self._random.random() * (count - 1))
        candidate, other = candidates[first], candidates[second + (second >= first)]
        return Choice(other if self._burden.of(other) < self._burden.of(candidate) else candidate, POWER_OF_TWO)

    def routed(self, worker: RoutingCandidate, ask: RoutingRequest) -> None:
        """The load figures know."""

    def forget(self, name: str) -> None:
        self._burden.forget(name)

    def matched(self, worker: RoutingCandidate, ask: RoutingRequest) -> int:
        return 0
