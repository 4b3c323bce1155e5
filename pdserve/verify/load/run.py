"""Carries out the proofs of a load, in order."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import httpx

from pdserve.observe.engine_metrics import EngineSnapshot
from pdserve.plan.model import Plan
from pdserve.verify import cleanliness, endpoints, pool
from pdserve.verify.load import comparison, proofs, reload_proof
from pdserve.verify.load.comparison import ComparedAnswers
from pdserve.verify.load.options import LoadOptions
from pdserve.verify.load.schedule import Schedule, make_schedule
from pdserve.verify.load.traffic import OnWindow, Traffic, send
from pdserve.verify.load.windows import LoadReport, make_windows
from pdserve.verify.outcome import Outcome, not_proven
from pdserve.verify.proofs import OnProof, Proofs
from pdserve.verify.target import Target


@dataclass(frozen=True)
class _Sent:
    """A load that is over, as its proofs look at it."""

    schedule: Schedule
    before: Mapping[str, EngineSnapshot]
    traffic: Traffic
    comparison: ComparedAnswers = field(default_factory=ComparedAnswers)


Prove = Callable[[Target, _Sent], Awaitable[Outcome]]


async def run_load(
    plan: Plan,
    options: LoadOptions,
    *,
    engine_key: str,
    client: httpx.AsyncClient,
    on_proof: OnProof | None = None,
    on_window: OnWindow | None = None,
) -> LoadReport:
    """Never raises for what it sees: see Report.raise_for_status. `on_window` hears of each window once it was sent.

    The deployment may serve others meanwhile; proofs that need it quiet then are not-proven, or fail.
    """
    target = Target(plan, client, engine_key)
    done = Proofs(on_proof)
    alive = await done.carry_out("endpoints", endpoints.CLAIM, partial(endpoints.prove, target))
    loads: list[_Sent] = []

    async def answers() -> Outcome:
        loads.append(await _send(target, options, on_window))
        return proofs.prove_answers(target, loads[0].traffic, options)

    if alive:
        reason = "the requests that it would look at were not answered"
        alive = await done.carry_out("load-answers", proofs.answers_claim(target), answers)
    else:
        reason = "nothing was sent: not all endpoints answer"
        done.add("load-answers", proofs.answers_claim(target), not_proven(reason))
    for name, claim, prove in _proofs(target):
        if alive:
            await done.carry_out(name, claim, partial(prove, target, loads[0]))
        else:
            done.add(name, claim, not_proven(reason))
    windows = [make_windows(load.traffic, load.comparison.compared, load.comparison.different) for load in loads]
    return LoadReport(deployment=plan.name, proofs=done.done, windows=windows[0] if windows else ())


async def _send(target: Target, options: LoadOptions, on_window: OnWindow | None) -> _Sent:
    schedule = await make_schedule(target, options)
    before = await cleanliness.quiet(target)
    reloads = target.plan.cache_reset_endpoint and _keeps_kv(target.plan)
    return _Sent(schedule, before, await send(target, schedule, options, reloads=reloads, on_window=on_window))


def _proofs(target: Target) -> list[tuple[str, str, Prove]]:
    """Those that apply, in order. `load-clean` comes before the comparison, which sends requests of its own."""
    applicable: list[tuple[str, str, Prove]] = []
    if target.decoders:
        applicable.append(("load-transfer", proofs.TRANSFER_CLAIM, _transfer))
    if _keeps_kv(target.plan):
        applicable.append(("load-reload", reload_proof.claim(target), _reload))
    return [*applicable, ("load-clean", proofs.CLEAN_CLAIM, _clean), ("load-output", comparison.CLAIM, _output)]


def _keeps_kv(plan: Plan) -> bool:
    """Outside of the engines' own prefix caches."""
    return bool(plan.lmcache or pool.engines_with_store(plan) or pool.engines_that_offload(plan))


async def _transfer(target: Target, sent: _Sent) -> Outcome:
    return await proofs.prove_transfer(target, sent.traffic)


async def _reload(target: Target, sent: _Sent) -> Outcome:
    return reload_proof.prove(target, sent.traffic)


async def _clean(target: Target, sent: _Sent) -> Outcome:
    return await proofs.prove_clean(target, sent.before)


async def _output(target: Target, sent: _Sent) -> Outcome:
    return await comparison.prove(target, sent.schedule, sent.traffic, sent.comparison)
