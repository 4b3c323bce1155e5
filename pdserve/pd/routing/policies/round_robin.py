"""round_robin: every worker in turn, whatever its load."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import ClassVar, Final

from pdserve.pd.routing.ask import RoutingRequest
from pdserve.pd.routing.policy import Choice, RoutingCandidate, W
from pdserve.pd.routing.turns import Turns
from pdserve.roles import EngineRole

TURN: Final = "turn"


class RoundRobin:
    """Each worker once a round. Over many requests every pair of a prefill and a decode has its turn."""

    name = "round_robin"
    needs_tokens = False
    reasons: ClassVar[tuple[str, ...]] = (TURN,)

    def __init__(self, role: EngineRole, random: Random) -> None:
        self._turns = Turns(random if role == "decode" else None)

    def choose(self, candidates: Sequence[W], ask: RoutingRequest) -> Choice[W]:
        return Choice(self._turns.next(candidates), TURN)

    def routed(self, worker: RoutingCandidate, ask: RoutingRequest) -> None:
        """Turns are counted in `choose`."""

    def forget(self, name: str) -> None:
        self._turns.forget(name)

    def matched(self, worker: RoutingCandidate, ask: RoutingRequest) -> int:
        return 0
