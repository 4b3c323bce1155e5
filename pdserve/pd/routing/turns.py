"""Give turns: every worker has one a round."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from pdserve.pd.routing.policy import W


class WorkerTurn:
    """The next turn of a worker: in this round, after those with a smaller `order`."""

    __slots__ = ("order", "round")

    def __init__(self, round_: int, order: float) -> None:
        self.round = round_
        self.order = order


class Turns:
    """Orders workers in a fixed order, or in a new random one each round.

    One pool in a fixed order and the other shuffled: two fixed orders in step would only ever form the same pairs, with
    pools of equal size as many pairs as workers. A policy does not know the size of the other pool, so no fixed shift
    between the two is right for all sizes.
    """

    __slots__ = ("_random", "_round", "_seen", "_turns")

    def __init__(self, shuffled: Random | None) -> None:
        """`shuffled`: where the random order comes from; None for the fixed one."""
        self._random = shuffled
        self._round = 0
        self._seen = 0
        self._turns: dict[str, WorkerTurn] = {}

    def next(self, candidates: Sequence[W]) -> W:
        """Return the worker that has waited longest; it has now had its turn."""
        chosen, least = candidates[0], self._turn(candidates[0].name)
        for place in range(1, len(candidates)):
            candidate = candidates[place]
            turn = self._turn(candidate.name)
            if turn.round < least.round or (turn.round == least.round and turn.order < least.order):
                chosen, least = candidate, turn
        self._round = least.round
        least.round += 1
        if self._random is not None:
            least.order = self._random.random()
        return chosen

    def forget(self, name: str) -> None:
        self._turns.pop(name, None)

    def _turn(self, name: str) -> WorkerTurn:
        turn = self._turns.get(name)
        if turn is None:
            self._seen += 1
            order = float(self._seen) if self._random is None else self._random.random()
            turn = self._turns[name] = WorkerTurn(self._round, order)
        # Rounds that it missed are not made up for: a worker that comes back would get every request for a while.
        turn.round = max(turn.round, self._round)
        return turn
