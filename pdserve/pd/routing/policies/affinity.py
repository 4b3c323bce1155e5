"""Session affinity: the requests of one session go to the same worker.

By rendezvous hashing: every worker has a score for a session, and the highest one is the session's home. Nothing is
remembered, so there is nothing to bound or to expire, several proxy processes and a restarted proxy agree, and when a
worker leaves only its own sessions move; they return when it does. While the home is too busy a request goes to the
session's next worker, always the same one, and returns home as soon as that is no longer too busy: the home's cache
still has most of the session, and staying would need a memory that other processes do not share.

The price: the spread of few sessions over few workers is as uneven as chance, until the load guard evens it out.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Final

from pdserve.pd.routing.ask import RoutingRequest
from pdserve.pd.routing.burden import Burden
from pdserve.pd.routing.policy import Choice, Policy, RoutingCandidate, W

_MASK: Final = (1 << 64) - 1
SESSION: Final = "session"  # the session's own worker
SESSION_SPILLED: Final = "session_spilled"  # that one is too busy: the session's next


class Affinity:
    """Around any policy, which decides for requests without a session and gets the events of all."""

    def __init__(self, inner: Policy, burden: Burden) -> None:
        self.inner = inner
        self._burden = burden
        self._hashes: dict[str, int] = {}

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def needs_tokens(self) -> bool:
        return self.inner.needs_tokens

    @property
    def reasons(self) -> tuple[str, ...]:
        return (*self.inner.reasons, SESSION, SESSION_SPILLED)

    def choose(self, candidates: Sequence[W], ask: RoutingRequest) -> Choice[W]:
        if ask.session is None:
            return self.inner.choose(candidates, ask)
        session = _hash(ask.session)
        home = max(candidates, key=lambda worker: self._score(session, worker))
        calmest = candidates[self._burden.calmest(candidates)]
        if not self._burden.too_busy(home, calmest):
            return Choice(home, SESSION)
        # Never empty: no worker is too busy in comparison with itself.
        calm = [worker for worker in candidates if not self._burden.too_busy(worker, calmest)]
        return Choice(max(calm, key=lambda worker: self._score(session, worker)), SESSION_SPILLED)

    def routed(self, worker: RoutingCandidate, ask: RoutingRequest) -> None:
        self.inner.routed(worker, ask)

    def forget(self, name: str) -> None:
        self._hashes.pop(name, None)
        self.inner.forget(name)

    def matched(self, worker: RoutingCandidate, ask: RoutingRequest) -> int:
        return self.inner.matched(worker, ask)

    def _score(self, session: int, worker: RoutingCandidate) -> int:
        known = self._hashes.get(worker.name)
        if known is None:
            known = self._hashes[worker.name] = _hash(worker.name)
        # The finalizer of splitmix64: without it scores would only differ in the bits in which the names do.
        mixed = session ^ known
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
        return mixed ^ (mixed >> 31)


def _hash(text: str) -> int:
    """Return a hash that is equal in every process, unlike Python's."""
    return int.from_bytes(blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest(), "little")
