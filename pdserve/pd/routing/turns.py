"""Whose turn it is: every worker once a round."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from pdserve.pd.routing.policy import W


class Turns:
    """In a fixed order, or in a new random order each round.

    One pool in a fixed order and the other shuffled: two fixed orders in step would only ever form the same pairs, with
    pools of equal size as many pairs as workers. A policy does not know the size of the other pool, so no fixed shift
    between the two is right for all sizes.
    """

    __slots__ = ("_random", "_round", "_seen", "_tickets")

    def __init__(self, shuffled: Random | None) -> None:
        """`shuffled`: where the random order comes from; None for the fixed one."""
        self._random = shuffled
        self._round = 0
        self._seen = 0
        self._tickets: dict[str, tuple[int, float]] = {}

    def next(self, candidates: Sequence[W]) -> W:
        """Who has waited longest of them; it has now had its turn."""
        chosen, least = candidates[0], self._ticket(candidates[0].name)
        for candidate in candidates[1:]:
            ticket = self._ticket(candidate.name)
            if ticket < least:
                chosen, least = candidate, ticket
        self._round = least[0]
        self._tickets[chosen.name] = (least[0] + 1, least[1] if self._random is None else self._random.random())
        return chosen

    def forget(self, name: str) -> None:
        self._tickets.pop(name, None)

    def _ticket(self, name: str) -> tuple[int, float]:
        ticket = self._tickets.get(name)
        if ticket is None:
            self._seen += 1
            ticket = self._tickets[name] = (self._round, self._seen if self._random is None else self._random.random())
        # Rounds that it missed are not made up for: a worker that comes back would get every request for a while.
        return ticket if ticket[0] >= self._round else (self._round, ticket[1])
