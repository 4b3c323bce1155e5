"""Judges who is to blame when no KV crosses between a new engine and one of the other role that served before it.

An engine that was started anew is tried with each peer that serves. KV that crosses with one of them shows that the
new engine is well: the peers that failed are the broken ones. Where it fails with all, it is the suspect itself and is
started again; a peer that fails with that life too, and with none in between crossed, is the broken one after all.
A peer is restarted for this once in ten minutes: a pair that fails after that has another cause (its network), and
restarts would only cost requests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

Outcome = Literal["crossed", "failed", "unknown"]
"""unknown: it says nothing of either, as when the peer had no time for a canary, or died."""

_LIVES: Final = 2
AGAIN_SECONDS: Final = 600.0


@dataclass(frozen=True)
class PeerVerdict:
    """Says what the canaries of one new engine have shown."""

    proven: bool
    """It may be routed to."""
    bad: tuple[str, ...] = ()
    """Peers that are broken, and are to be restarted."""
    try_again: bool = False
    """The peers are broken that could have shown whether the new engine is well: it is to be tried once more, after
    their restart."""
    spared: tuple[str, ...] = ()
    """Peers that failed again although they were restarted for it."""


class PeerJudge:
    """Judges one deployment. Times are of one clock that never goes back."""

    def __init__(self) -> None:
        self._failures: Counter[str] = Counter()
        """Lives of new engines with which a peer failed, since it was started or KV last crossed with it."""
        self._restarted: dict[str, float] = {}

    def started(self, engine: str) -> None:
        """Note that an engine begins a new life."""
        self._failures.pop(engine, None)

    def judge(self, outcomes: Mapping[str, Outcome], now: float) -> PeerVerdict:
        """Judge the canaries of one new engine, given by peer."""
        crossed = [peer for peer, outcome in outcomes.items() if outcome == "crossed"]
        failed = [peer for peer, outcome in outcomes.items() if outcome == "failed"]
        for peer in crossed:
            self._failures.pop(peer, None)
        self._failures.update(failed)
        if not failed:
            return PeerVerdict(proven=True)
        broken = failed if crossed else [peer for peer in failed if self._failures[peer] >= _LIVES]
        spared = tuple(peer for peer in broken if now - self._restarted.get(peer, -AGAIN_SECONDS) < AGAIN_SECONDS)
        bad = tuple(peer for peer in broken if peer not in spared)
        if not crossed:
            # One at a time: they still serve with engines that are older.
            bad = bad[:1]
        self._restarted.update(dict.fromkeys(bad, now))
        return PeerVerdict(proven=bool(crossed), bad=bad, try_again=bool(bad) and not crossed, spared=spared)
