"""Carries out the proofs that apply to a deployment."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import httpx

from pdserve.observe.engine_metrics import view_client
from pdserve.plan.model import Plan
from pdserve.verify import cache, cleanliness, endpoints, output, pool, transfer
from pdserve.verify.outcome import Outcome, not_proven
from pdserve.verify.proofs import OnProof, Proofs
from pdserve.verify.report import Report
from pdserve.verify.target import Target
from pdserve.verify.trials import Trials, run_trials

Prove = Callable[[Target, Trials], Awaitable[Outcome]]


async def run_proofs(
    plan: Plan, *, engine_key: str, client: httpx.AsyncClient | None = None, on_proof: OnProof | None = None
) -> Report:
    """Proves what can be proven of the running deployment of `plan`. Never raises for what it finds: see
    Report.raise_for_status. `client` stays open if it is given. `on_proof` hears of each proof as it is done.

    The deployment may serve others meanwhile; proofs that need it quiet then are not-proven.
    """
    if client is not None:
        return await _Run(Target(plan, client, engine_key), on_proof).all()
    async with view_client() as own:
        return await _Run(Target(plan, own, engine_key), on_proof).all()


class _Run:
    def __init__(self, target: Target, on_proof: OnProof | None) -> None:
        self._target = target
        self._proofs = Proofs(on_proof)

    async def all(self) -> Report:
        target = self._target
        alive = await self._proofs.carry_out("endpoints", endpoints.CLAIM, lambda: endpoints.prove(target))
        trials = await self._trials() if alive else "nothing was sent: not all endpoints answer"
        for name, claim, prove in _proofs(target.plan):
            if isinstance(trials, Trials):
                await self._proofs.carry_out(name, claim, _bound(prove, target, trials))
            else:
                self._proofs.add(name, claim, not_proven(trials))
        return Report(deployment=target.plan.name, proofs=self._proofs.done)

    async def _trials(self) -> Trials | str:
        """The requests that the proofs look at, or why there are none. A request that fails is a proof that failed."""
        claim = "Requests through the proxy are answered."
        trials: list[Trials] = []

        async def send() -> Outcome:
            trials.append(await run_trials(self._target))
            return Outcome("proven", {"requests": len(trials[0].trials)})

        if await self._proofs.carry_out("requests", claim, send):
            return trials[0]
        return "the requests that it would look at were not answered"


def _proofs(plan: Plan) -> list[tuple[str, str, Prove]]:
    """In the order in which they are carried out. `stored` comes before other requests fill LMCache; `clean` last,
    when nothing else of ours is on its way."""
    proofs: list[tuple[str, str, Prove]] = []
    if plan.mode == "disaggregated":
        proofs.append(("transfer", transfer.CLAIM, transfer.prove))
    if plan.lmcache:
        proofs.append(("stored", cache.STORED_CLAIM, cache.prove_stored))
    if pool.engines_with_store(plan):
        proofs.append(("pool-stored", pool.STORED_CLAIM, pool.prove_stored))
    proofs.append(("output", output.CLAIM, output.prove))
    if plan.lmcache:
        proofs.append(("reload", cache.RELOAD_CLAIM, cache.prove_reload))
    if pool.engines_with_store(plan):
        proofs.append(("pool-reload", pool.RELOAD_CLAIM, pool.prove_store_reload))
    if pool.engines_that_offload(plan):
        proofs.append(("offload-reload", pool.OFFLOAD_CLAIM, pool.prove_offload_reload))
    proofs.append(("clean", cleanliness.CLAIM, cleanliness.prove))
    return proofs


def _bound(prove: Prove, target: Target, trials: Trials) -> Callable[[], Awaitable[Outcome]]:
    return lambda: prove(target, trials)
