"""prefix_aware: to the worker that was sent the longest beginning of this prompt.

An approximation on three counts: it knows what this process sent, not what an engine still holds; it compares the bytes
of the request, not tokens; and it forgets by its own rule. Only load figures are shared between proxy processes, so
with several of them session affinity, which all agree on, keeps more of the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from pdserve.pd.config.routing import PrefixAwareSettings as PrefixSettings
from pdserve.pd.routing.ask import RoutingRequest
from pdserve.pd.routing.burden import Burden
from pdserve.pd.routing.chain import GrowingChain
from pdserve.pd.routing.policies.by_match import BY_MATCH, by_match
from pdserve.pd.routing.policy import Choice, RoutingCandidate, W
from pdserve.pd.routing.recent_blocks import RecentBlocks


class PrefixAware:
    """Remembers for each worker the blocks of prompts that it was sent lately."""

    name = "prefix_aware"
    needs_tokens = False
    reasons: ClassVar[tuple[str, ...]] = BY_MATCH

    def __init__(self, burden: Burden, settings: PrefixSettings) -> None:
        self._burden = burden
        self._block_bytes = settings.block_bytes
        self._max_blocks = settings.max_blocks
        self._min_match_ratio = float(settings.min_match_ratio)
        self._sent: dict[str, RecentBlocks] = {}

    def choose(self, candidates: Sequence[W], ask: RoutingRequest) -> Choice[W]:
        chain = ask.prompt_chain(self._block_bytes)
        held = [self._held(candidate.name, chain, ask) for candidate in candidates]
        return by_match(candidates, held, self._burden, ask, self._min_match_ratio)

    def routed(self, worker: RoutingCandidate, ask: RoutingRequest) -> None:
        sent = self._sent.get(worker.name)
        if sent is None:
            sent = self._sent[worker.name] = RecentBlocks(self._max_blocks)
        sent.use(ask.prompt_chain(self._block_bytes).names)

    def forget(self, name: str) -> None:
        self._sent.pop(name, None)
        self._burden.forget(name)

    def matched(self, worker: RoutingCandidate, ask: RoutingRequest) -> int:
        return self._held(worker.name, ask.prompt_chain(self._block_bytes), ask)

    @property
    def blocks(self) -> int:
        """Remembered now, of all workers."""
        return sum(len(sent) for sent in self._sent.values())

    def _held(self, name: str, chain: GrowingChain, ask: RoutingRequest) -> int:
        """Prompt tokens that the worker of that name was sent."""
        sent = self._sent.get(name)
        held = chain.held(sent) if sent is not None else 0
        return ask.estimate * held // chain.length if held else 0
