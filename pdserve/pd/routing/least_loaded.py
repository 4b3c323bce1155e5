"""least_loaded: prefill by prompt tokens in flight, decode by streams and KV use."""

from __future__ import annotations

from collections.abc import Sequence

from pdserve.pd.routing.ask import Ask
from pdserve.pd.routing.burden import Burden
from pdserve.pd.routing.policy import Candidate, Choice, W


class LeastLoaded:
    """The least loaded of all. Equals have it in turn."""

    name = "least_loaded"
    needs_tokens = False

    def __init__(self, burden: Burden) -> None:
        self._burden = burden

    def choose(self, candidates: Sequence[W], ask: Ask) -> Choice[W]:
        return Choice(self._burden.least(candidates), "least_loaded")

    def routed(self, worker: Candidate, ask: Ask) -> None:
        """The load figures know."""

    def forget(self, name: str) -> None:
        self._burden.forget(name)

    def matched(self, worker: Candidate, ask: Ask) -> int:
        return 0
