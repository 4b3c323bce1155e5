"""The choice of a worker: each role's policy over those of its workers that may be used now."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from pdserve.pd.config.proxy import ProxyConfig
from pdserve.pd.routing.ask import RoutingRequest
from pdserve.pd.routing.build import make
from pdserve.pd.routing.conditional import decide
from pdserve.pd.routing.policy import Policy
from pdserve.pd.workers.registry import Registry, Worker
from pdserve.roles import EngineRole


class Pools:
    """The policy of each pool. `decisions` counts (role, policy, why)."""

    def __init__(self, config: ProxyConfig, registry: Registry) -> None:
        self._registry = registry
        self.decisions: dict[tuple[str, str, str], int] = {}
        self.configure(config)
        registry.on_lost(self._forget)

    def configure(self, config: ProxyConfig) -> None:
        """Other policies from now on; what they had learnt is gone."""
        routing = config.routing
        self.policies: dict[EngineRole, Policy] = {role: make(routing, role) for role in self._registry.roles}
        self._thresholds = routing.conditional
        self.needs_tokens = any(policy.needs_tokens for policy in self.policies.values())
        """A policy wants exact token ids."""

    def pick(self, role: EngineRole, ask: RoutingRequest, avoid: Collection[Worker] = ()) -> Worker:
        """A worker that may be used; 503 when there is none."""
        candidates = self._registry.ready(role, avoid)
        if not candidates:
            raise self._registry.no_worker(role)
        if role == "prefill":
            candidates = _with_room(candidates)
        policy = self.policies[role]
        choice = policy.choose(candidates, ask)
        worker = choice.worker
        policy.routed(worker, ask)
        decision = (role, policy.name, choice.why)
        self.decisions[decision] = self.decisions.get(decision, 0) + 1
        return worker

    def skips_prefill(self, ask: RoutingRequest, decode: Worker) -> str | None:
        """Return why this decode computes the prompt itself; None: prefill does."""
        if self._thresholds is None:
            return None
        held = self.policies["decode"].matched(decode, ask)
        decision = decide(ask.estimate, held, self._thresholds)
        return decision.why if decision.way == "decode-only" else None

    def _forget(self, worker: Worker) -> None:
        for policy in self.policies.values():
            policy.forget(worker.name)


def _with_room(workers: Sequence[Worker]) -> Sequence[Worker]:
    """One whose places for transfers are all taken would let the request wait; unless all of them would."""
    for worker in workers:
        if worker.slots.free <= 0:
            return [other for other in workers if other.slots.free > 0] or workers
    return workers
