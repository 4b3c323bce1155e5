"""kv_events: to the worker whose KV cache holds most of the prompt, exactly, by token ids.

Without token ids it has no opinion and says so ("no_tokens"): it never compares text. Events arrive some milliseconds
after a block is full, so a burst of the same new prompt is spread by load.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Final

from pdserve.pd.config.routing import KvEventsSettings
from pdserve.pd.routing.ask import RoutingRequest
from pdserve.pd.routing.burden import Burden
from pdserve.pd.routing.kv_index import KvIndex
from pdserve.pd.routing.policies.by_match import BY_MATCH, by_match
from pdserve.pd.routing.policy import Choice, RoutingCandidate, W

NO_TOKENS: Final = "no_tokens"  # the token ids are not known: the least loaded


class KvEvents:
    """The `index` must be fed, by a KvSubscriber."""

    name = "kv_events"
    needs_tokens = True
    reasons: ClassVar[tuple[str, ...]] = (*BY_MATCH, NO_TOKENS)

    def __init__(self, burden: Burden, settings: KvEventsSettings) -> None:
        self._burden = burden
        self._min_match_ratio = float(settings.min_match_ratio)
        self.index = KvIndex(settings.max_blocks)
        self.replay_timeout_seconds = float(settings.replay_timeout_seconds)
        """For who feeds the index."""

    def choose(self, candidates: Sequence[W], ask: RoutingRequest) -> Choice[W]:
        if ask.tokens is None:
            return Choice(self._burden.least(candidates), NO_TOKENS)
        held = [self.matched(candidate, ask) for candidate in candidates]
        return by_match(candidates, held, self._burden, ask, self._min_match_ratio)

    def routed(self, worker: RoutingCandidate, ask: RoutingRequest) -> None:
        """The worker's events will show what it kept."""

    def forget(self, name: str) -> None:
        self.index.forget(name)
        self._burden.forget(name)

    def matched(self, worker: RoutingCandidate, ask: RoutingRequest) -> int:
        return max(self.index.matched(worker.name, ask).values(), default=0)

    def rank(self, worker: RoutingCandidate, ask: RoutingRequest) -> int | None:
        """The data parallel rank that holds most of the prompt; None when none holds any of it."""
        held = self.index.matched(worker.name, ask)
        rank = max(held, key=held.__getitem__, default=None)
        return rank if rank is not None and held[rank] else None
