"""The choice of a worker: each role's policy over those of its workers that may be used now."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from pdserve.pd.config import ProxyConfig, WorkerRole
from pdserve.pd.errors import ApiError
from pdserve.pd.registry import RETRY_AFTER_SECONDS, Registry, Worker
from pdserve.pd.routing.ask import Ask
from pdserve.pd.routing.build import make
from pdserve.pd.routing.conditional import decide
from pdserve.pd.routing.policy import Policy
from pdserve.pd.routing_settings import of_role, policy_of, thresholds


class Pools:
    """Of one proxy process. `decisions` counts (role, policy, why)."""

    def __init__(self, config: ProxyConfig, registry: Registry) -> None:
        self._registry = registry
        self.decisions: Counter[tuple[str, str, str]] = Counter()
        self.configure(config)
        registry.on_lost(self._forget)

    def configure(self, config: ProxyConfig) -> None:
        """Other policies from now on; what they had learnt is gone."""
        routing = config.routing
        self.policies: dict[WorkerRole, Policy] = {
            role: make(policy_of(routing, role).kind, role, of_role(routing, role)) for role in self._registry.roles
        }
        self._thresholds = thresholds(routing) if routing.conditional is not None else None

    @property
    def needs_tokens(self) -> bool:
        """A policy wants exact token ids."""
        return any(policy.needs_tokens for policy in self.policies.values())

    def pick(self, role: WorkerRole, ask: Ask, avoid: Collection[Worker] = ()) -> Worker:
        """A worker that may be used; 503 when there is none."""
        candidates = self._registry.ready(role, avoid)
        if role == "prefill" and len(candidates) > 1:
            # One whose places for transfers are all taken would let the request wait.
            candidates = [worker for worker in candidates if not worker.slots.full] or candidates
        if not candidates:
            raise no_worker(role)
        policy = self.policies[role]
        choice = policy.choose(candidates, ask)
        policy.routed(choice.worker, ask)
        self.decisions[role, policy.name, choice.why] += 1
        return choice.worker

    def skips_prefill(self, ask: Ask, decode: Worker) -> str | None:
        """Why this decode computes the prompt itself; None: prefill does."""
        if self._thresholds is None:
            return None
        held = self.policies["decode"].matched(decode, ask)
        decision = decide(ask.estimate, held, self._thresholds)
        return decision.why if decision.way == "decode-only" else None

    def _forget(self, worker: Worker) -> None:
        for policy in self.policies.values():
            policy.forget(worker.name)


def no_worker(role: WorkerRole) -> ApiError:
    """What a client gets while a pool has no worker."""
    return ApiError(503, f"No {role} worker is ready.", retry_after=RETRY_AFTER_SECONDS)
