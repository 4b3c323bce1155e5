"""Prove that a running deployment does what its recipe says: the proofs of every deployment, and the run of all.

The proofs of caches are in cache.py, those under load in load/.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping

import httpx

from pdserve.observe.metrics import EngineSnapshot, engine_snapshot, view_client
from pdserve.plan.model import Plan
from pdserve.verify import cache
from pdserve.verify.report import Numbers, OnProof, Outcome, Proofs, Report, failed, not_proven, proven
from pdserve.verify.target import (
    Target,
    cancel_after_first_chunk,
    cancel_before_first_byte,
    read_stream,
)
from pdserve.verify.trials import Trial, Trials, alter_prompt, force, generate, longest_answer, run_trials

_NO_KEY = (
    "vllm-router asks an engine for its models with the Authorization of the client, and clients have none that "
    "engines take: they can send requests and cannot list models"
)
ENDPOINTS_CLAIM = "Every engine, the proxy and every LMCache server answers, and all of them serve the same model name."


async def prove_endpoints(target: Target) -> Outcome:
    checks = [(worker.name, worker.url, "/health") for worker in target.plan.proxy.workers]
    checks += [(server.process, server.http_url, "/healthcheck") for server in target.plan.lmcache]
    checks.append(("proxy", target.proxy_url, "/readiness" if target.through_router else "/ready"))
    wrong = []
    for name, url, path in checks:
        if trouble := _trouble(await target.get(url, path)):
            wrong.append(f"{name} ({url}{path}): {trouble}")
    for worker in target.plan.proxy.workers:
        wrong += await _models(target, worker.name, worker.url)
    listed = await _models(target, "proxy", target.proxy_url)
    numbers: Numbers = {"processes": len(checks), "served name": target.plan.served_name}
    if listed and target.through_router and not wrong:
        return failed(f"{listed[0].rstrip(': ')}. {_NO_KEY}", numbers, goes_on=True)
    if wrong or listed:
        return failed("; ".join(wrong + listed) + ". `pdserve status` shows which processes live", numbers)
    return proven(numbers)


async def _models(target: Target, name: str, url: str) -> list[str]:
    """Return what is wrong with a list of models; nothing, if nothing is."""
    answer = await target.get(url, "/v1/models")
    trouble = _trouble(answer)
    if trouble is None and isinstance(answer, httpx.Response):
        trouble = _other_models(answer, target.plan.served_name)
    return [f"{name} ({url}/v1/models): {trouble}"] if trouble else []


def _trouble(answer: httpx.Response | str) -> str | None:
    if isinstance(answer, str):
        return answer
    return None if answer.status_code == 200 else f"HTTP {answer.status_code} {answer.text[:200]}".strip()


def _other_models(answer: httpx.Response, served_name: str) -> str | None:
    try:
        names = [str(card["id"]) for card in answer.json()["data"]]
    except (ValueError, KeyError, TypeError):
        return "the answer is no list of models"
    return None if served_name in names else f"serves {', '.join(names) or 'nothing'}, not {served_name}"


TRANSFER_CLAIM = "Decode received the KV of every prompt and computed none of it beyond what vLLM always recomputes."
ALWAYS_RECOMPUTED = 1
"""vLLM needs the last prompt token's logits. 0.32.0 counts it as received all the same (619 of 619), connectors that
leave it out report one less; hybrid models load one token less."""


async def prove_transfer(target: Target, trials: Trials) -> Outcome:
    """Prove the transfer from the counters of the decode engines: what an answer's usage calls cached is what prefill
    had in a cache. The salt was new, so decode's own prefix cache cannot be the source. Requests of others count too:
    beside traffic that does not go through prefill the proof can fail, never hold by mistake for them alone."""
    prompts = [trial.answer.prompt_tokens for trial in trials.trials]
    numbers: Numbers = {"prompts": len(prompts), "prompt tokens": len(trials.trials[0].prompt)}
    received = [trials.received(worker.name) for worker in target.decoders]
    computed = [trials.computed(worker.name) for worker in target.decoders]
    for worker in target.producers:
        numbers[f"{worker.name}: tokens computed"] = trials.computed(worker.name)
    for worker, tokens in zip(target.decoders, received, strict=True):
        numbers[f"{worker.name}: tokens received"] = tokens
    got, own = [count for count in received if count is not None], [count for count in computed if count is not None]
    if len(got) < len(received) or len(own) < len(computed):
        return not_proven(
            "the decode engines do not count where the tokens of their prompts came from, or could not be read", numbers
        )
    numbers["received by decode"], numbers["computed on decode"] = sum(got), sum(own)
    allowed = ALWAYS_RECOMPUTED * len(prompts)
    if sum(got) < sum(prompts) - allowed or sum(own) > allowed:
        logs = ", ".join(target.log(w.name) for w in (*target.decoders, *target.producers))
        return failed(
            f"decode received {sum(got)} of {sum(prompts)} prompt tokens and computed {sum(own)} itself: KV was not "
            f"transferred, or not all of it; see {logs}",
            numbers,
        )
    return proven(numbers)


OUTPUT_CLAIM = (
    "Answers through the proxy equal those of one instance that computed the whole prompt itself, "
    "and another prompt gives another answer."
)


async def prove_output(target: Target, trials: Trials) -> Outcome:
    if target.plan.verify.output == "exact":
        return await _exact(target, trials)
    return await _logprobs(target, trials)


async def _exact(target: Target, trials: Trials) -> Outcome:
    numbers = _numbers(target, trials)
    equal = 0
    difference = ""
    for number, trial in enumerate(trials.trials):
        alone = await generate(target, trial.prompt, f"reference-{number}")
        if alone.tokens == trial.answer.tokens:
            equal += 1
        elif not difference:
            difference = first_difference(f"prompt {number}", trial.answer.tokens, alone.tokens)
    numbers["equal answers"] = equal
    control = await generate(target, _control_prompt(target, trials), "control")
    changed = sum(a != b for a, b in zip(control.tokens, trials.trials[0].answer.tokens, strict=False))
    numbers["control: tokens that differ"] = changed
    if difference:
        return failed(f"{difference}. {where_to_look(target)}", numbers)
    if not changed:
        return failed(INSENSITIVE, numbers)
    return proven(numbers)


async def _logprobs(target: Target, trials: Trials) -> Outcome:
    numbers = _numbers(target, trials)
    tolerance = target.plan.verify.logprob_tolerance
    numbers["tolerance"] = tolerance
    differences: list[float] = []
    for number, trial in enumerate(trials.trials):
        if len(trial.answer.logprobs) != len(trial.answer.tokens):
            return failed("the proxy's answer carries no logprobs although they were asked for", numbers)
        differences += await logprob_distances(target, trial, trial.prompt, f"reference-{number}")
    numbers["max |logprob difference|"] = round(max(differences), 6)
    numbers["mean |logprob difference|"] = round(sum(differences) / len(differences), 6)
    control = await logprob_distances(target, trials.trials[0], _control_prompt(target, trials), "control")
    numbers["control: max |difference|"] = round(max(control), 6)
    if max(differences) > tolerance:
        return failed(
            f"logprobs differ by up to {max(differences):.4f}, allowed are {tolerance:g}. {where_to_look(target)}",
            numbers,
        )
    if max(control) <= tolerance:
        return failed(INSENSITIVE, numbers)
    return proven(numbers)


async def logprob_distances(target: Target, trial: Trial, prompt: tuple[int, ...], leg: str) -> list[float]:
    forced = await force(target, prompt, trial.answer.tokens, leg)
    return [abs(a - b) for a, b in zip(forced.chosen, trial.answer.logprobs, strict=True)]


def _control_prompt(target: Target, trials: Trials) -> tuple[int, ...]:
    return alter_prompt(trials.trials[0].prompt, trials.trials[1].prompt, target.chunk)


def _numbers(target: Target, trials: Trials) -> Numbers:
    return {
        "compared": target.plan.verify.output,
        "prompts": len(trials.trials),
        "prompt tokens": len(trials.trials[0].prompt),
        "output tokens": len(trials.trials[0].answer.tokens),
        "reference": target.reference.name,
    }


def first_difference(label: str, through: tuple[int, ...], alone: tuple[int, ...]) -> str:
    place = next((i for i, (a, b) in enumerate(zip(through, alone, strict=False)) if a != b), None)
    if place is None:
        return f"{label}: {len(through)} tokens came through the proxy, {len(alone)} from the reference"
    return (
        f"{label}: output token {place} is {through[place]} through the proxy "
        f"and {alone[place]} from one instance alone"
    )


INSENSITIVE = (
    "another first chunk of the prompt does not change the answer: this model hardly looks at its context (dummy "
    "weights?), so equal answers prove nothing"
)


def where_to_look(target: Target) -> str:
    if not target.decoders:
        return "Both answers come from aggregated engines: are their weights and arguments the same?"
    logs = ", ".join(target.log(worker.name) for worker in target.decoders)
    return f"Decode worked on other KV than prefill computed, or the roles run other weights or dtypes: see {logs}"


CLEAN_CLAIM = (
    "A streamed request, a plain one and two that were cancelled leave no running request, "
    "and KV-cache use returns to its earlier value on every engine."
)
_LONGEST_WAIT_SECONDS = 30.0
_QUIET_SECONDS = 3.0
_QUIET_READINGS = 2
_POLL_SECONDS = 0.2
_LONG_ANSWER_TOKENS = 512
"""Of the requests that are cancelled: long enough to be running still."""
_CLOSE_AFTER_SECONDS = 0.05
_USAGE_SLACK = 1e-9
"""For rounding only: one block of a large cache is a millionth of it."""


async def prove_clean(target: Target, trials: Trials) -> Outcome:
    prompt = trials.trials[0].prompt
    before = await read_idle_engines(target)
    if reason := why_not_comparable(before):
        return not_proven(reason)

    long = await longest_answer(target, prompt, _LONG_ANSWER_TOKENS)
    numbers: Numbers = {"streamed chunks": await read_stream(target, prompt, "stream", 8)}
    plain = await target.complete(target.proxy_url, prompt, salt=target.salt("plain"), max_tokens=8)
    numbers["plain tokens"] = len(plain.tokens)
    numbers["cancelled after first chunk"] = await cancel_after_first_chunk(target, prompt, "cancelled", long)
    numbers["cancelled before first byte"] = await cancel_before_first_byte(
        target, prompt, "abandoned", long, after=_CLOSE_AFTER_SECONDS
    )
    if left := await left_behind(target, before, numbers):
        return failed(left, numbers)
    return proven(numbers)


async def left_behind(target: Target, before: Mapping[str, EngineSnapshot], numbers: Numbers) -> str:
    """Say what engines hold now and did not hold `before`; empty once they are as before. Adds to `numbers`."""
    began = time.monotonic()
    # Less than prefill keeps KV that is never fetched: what only its timeout frees was left behind.
    seconds = min(_LONGEST_WAIT_SECONDS, target.plan.timeouts.transfer_abort_seconds / 2)
    after = await _settle(target, before, seconds)
    numbers["seconds until clean"] = round(time.monotonic() - began, 2)
    left = []
    for name, snapshot in after.items():
        numbers[f"{name}: running, KV use"] = (
            f"{snapshot.unfinished}, {before[name].kv_cache_usage:g} -> {_usage(snapshot):g}"
        )
        if not _is_clean(snapshot, before[name]):
            left.append(
                f"{name} ({snapshot.error or f'{snapshot.unfinished} unfinished, KV use {_usage(snapshot):.4f}'})"
            )
    if not left:
        return ""
    return (
        f"{seconds:g} s later still not as before: {', '.join(left)}. A request was not aborted with its client, "
        f"prefill keeps KV that no decode fetches, or others use the deployment: see {target.log('proxy')}"
    )


def why_not_comparable(before: Mapping[str, EngineSnapshot]) -> str:
    """Return why it cannot be seen what requests leave behind; empty: it can."""
    if busy := [name for name, snapshot in before.items() if snapshot.unfinished]:
        return f"{', '.join(busy)} also serve others: what they leave looks like what these requests leave"
    if silent := [
        name for name, snapshot in before.items() if snapshot.unfinished is None or snapshot.kv_cache_usage is None
    ]:
        return f"{', '.join(silent)} report no running requests or no KV use (statistics off?)"
    return ""


async def read_idle_engines(target: Target) -> dict[str, EngineSnapshot]:
    """Return what engines report when none of our requests runs: the lowest of a few readings, because blocks of the
    last requests are released a step after their answers."""
    lowest = await _settle(target, None, _QUIET_SECONDS)
    for _ in range(_QUIET_READINGS):
        for name, snapshot in (await _nudge_engines(target)).items():
            if snapshot.reachable and _usage(snapshot) < _usage(lowest[name]):
                lowest[name] = snapshot
    return lowest


async def _settle(
    target: Target, wanted: Mapping[str, EngineSnapshot] | None, seconds: float
) -> dict[str, EngineSnapshot]:
    """Reads until all engines are as clean as `wanted` (None: run nothing), or the time is over."""
    until = time.monotonic() + seconds
    while True:
        now = await _nudge_engines(target)
        if time.monotonic() > until or all(
            _is_clean(snapshot, wanted[name] if wanted else None) for name, snapshot in now.items()
        ):
            return now
        await asyncio.sleep(_POLL_SECONDS)


async def _nudge_engines(target: Target) -> dict[str, EngineSnapshot]:
    """Read the engines' figures after one token each: gauges are set by engine steps, and an idle engine makes none."""
    now: dict[str, EngineSnapshot] = {}
    for worker in target.plan.proxy.workers:
        await target.nudge(worker)
        now[worker.name] = await engine_snapshot(worker.url, target.client)
    return now


def _is_clean(now: EngineSnapshot, before: EngineSnapshot | None) -> bool:
    return now.unfinished == 0 and (before is None or _usage(now) <= _usage(before) + _USAGE_SLACK)


def _usage(snapshot: EngineSnapshot) -> float:
    return 1.0 if snapshot.kv_cache_usage is None else snapshot.kv_cache_usage


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
        alive = await self._proofs.carry_out("endpoints", ENDPOINTS_CLAIM, lambda: prove_endpoints(target))
        trials = await self._trials() if alive else "nothing was sent: not all endpoints answer"
        for name, claim, prove in _proofs(target.plan):
            if isinstance(trials, Trials):
                await self._proofs.carry_out(name, claim, _bound(prove, target, trials))
            else:
                self._proofs.add(name, claim, not_proven(trials))
        return Report(deployment=target.plan.name, proofs=self._proofs.done)

    async def _trials(self) -> Trials | str:
        """Return the requests that the proofs look at, or why there are none. A request that fails is a proof that
        failed."""
        claim = "Requests through the proxy are answered."
        trials: list[Trials] = []

        async def send() -> Outcome:
            trials.append(await run_trials(self._target))
            return Outcome("proven", {"requests": len(trials[0].trials)})

        if await self._proofs.carry_out("requests", claim, send):
            return trials[0]
        return "the requests that it would look at were not answered"


def _proofs(plan: Plan) -> list[tuple[str, str, Prove]]:
    """Return the proofs in the order in which they are carried out. `stored` comes before other requests fill LMCache;
    `clean` last, when nothing else of ours is on its way."""
    proofs: list[tuple[str, str, Prove]] = []
    if plan.mode == "disaggregated":
        proofs.append(("transfer", TRANSFER_CLAIM, prove_transfer))
    if plan.lmcache:
        proofs.append(("stored", cache.STORED_CLAIM, cache.prove_stored))
    if cache.engines_with_store(plan):
        proofs.append(("pool-stored", cache.POOL_STORED_CLAIM, cache.prove_pool_stored))
    proofs.append(("output", OUTPUT_CLAIM, prove_output))
    if plan.lmcache:
        proofs.append(("reload", cache.RELOAD_CLAIM, cache.prove_reload))
    if cache.engines_with_store(plan):
        proofs.append(("pool-reload", cache.POOL_RELOAD_CLAIM, cache.prove_store_reload))
    if cache.engines_that_offload(plan):
        proofs.append(("offload-reload", cache.OFFLOAD_CLAIM, cache.prove_offload_reload))
    proofs.append(("clean", CLEAN_CLAIM, prove_clean))
    return proofs


def _bound(prove: Prove, target: Target, trials: Trials) -> Callable[[], Awaitable[Outcome]]:
    return lambda: prove(target, trials)
