"""Compare how busy workers are, and tell which is too busy for a request that would otherwise be its own."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from pdserve.pd.config.routing import LoadSettings
from pdserve.pd.routing.policy import RoutingCandidate, W
from pdserve.pd.routing.turns import Turns
from pdserve.roles import EngineRole

Load = tuple[int, int]


class Burden:
    """Loads of one pool, and the least loaded of it."""

    def __init__(self, role: EngineRole, settings: LoadSettings, random: Random) -> None:
        self.role = role
        self._kv_weight = float(settings.kv_weight)
        self._slack_tokens = settings.slack_tokens
        self._slack_requests = settings.slack_requests
        self._slack_ratio = float(settings.slack_ratio)
        self._max_kv_usage = float(settings.max_kv_usage)
        # At rest all loads are equal and ties decide: in the two pools they must not go in step.
        self._turns = Turns(random if role == "decode" else None)

    def of(self, worker: RoutingCandidate) -> Load:
        """Smaller is less busy. The second number decides between equal first ones.

        KV use counts in whole streams: differences below that are noise, and would send all requests of the two seconds
        until the next reading to the same worker.
        """
        if self.role == "prefill":
            return worker.prompt_tokens, worker.requests
        return worker.requests + int(worker.kv_usage * self._kv_weight), worker.prompt_tokens

    def calmest(self, candidates: Sequence[W]) -> int:
        """The place of the first one with the least load."""
        if len(candidates) == 1:
            return 0
        calm, least = 0, self.of(candidates[0])
        for place in range(1, len(candidates)):
            load = self.of(candidates[place])
            if load < least:
                calm, least = place, load
        return calm

    def least(self, candidates: Sequence[W]) -> W:
        """One with the least load; several with the same have it in turn."""
        if len(candidates) == 1:
            return self._turns.next(candidates)
        equals = [candidates[0]]
        least = self.of(candidates[0])
        for candidate in candidates[1:]:
            load = self.of(candidate)
            if load < least:
                equals, least = [candidate], load
            elif load == least:
                equals.append(candidate)
        return self._turns.next(equals)

    def too_busy(self, worker: RoutingCandidate, least: RoutingCandidate, saved: int = 0) -> bool:
        """Return whether `worker` should not get a request although it holds `saved` more tokens of it than `least`."""
        if worker is least:
            return False
        if self.role != "decode" and worker.prompt_tokens - least.prompt_tokens > self._slack_tokens + saved:
            return True
        if self.role == "prefill":
            return False
        if worker.requests > self._slack_ratio * least.requests + self._slack_requests:
            return True
        return worker.kv_usage >= self._max_kv_usage and least.kv_usage < self._max_kv_usage

    def forget(self, name: str) -> None:
        self._turns.forget(name)
