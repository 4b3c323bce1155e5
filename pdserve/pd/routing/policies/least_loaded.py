"""least_loaded: prefill by prompt tokens in flight, decode by streams and KV use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Final

from pdserve.pd.routing.ask import RoutingRequest
from pdserve.pd.routing.burden import Burden
from pdserve.pd.routing.policy import Choice, RoutingCandidate, W

LEAST_LOADED: Final = "least_loaded"


class LeastLoaded:
    """The least loaded of all. Equals have it in turn."""

    name = "least_loaded"
    needs_tokens = False
    reasons: ClassVar[tuple[str, ...]] = (LEAST_LOADED,)

    def __init__(self, burden: Burden) -> None:
        self._burden = burden

    def choose(self, candidates: Sequence[W], ask: RoutingRequest) -> Choice[W]:
        return Choice(self._burden.least(candidates), LEAST_LOADED)

    def routed(self, worker: RoutingCandidate, ask: RoutingRequest) -> None:
        """The load figures know."""

    def forget(self, name: str) -> None:
        self._burden.forget(name)

    def matched(self, worker: RoutingCandidate, ask: RoutingRequest) -> int:
        return 0
