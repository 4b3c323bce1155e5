"""Prove that a deployment does under load what its recipe says.

The proofs are `load-answers`, `load-transfer`, `load-reload`, `load-clean` and `load-output`.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import httpx
from pydantic import BaseModel, ConfigDict

from pdserve.observe.metrics import EngineSnapshot, lmcache_snapshot
from pdserve.plan.model import Plan
from pdserve.verify.cache import engines_that_offload, engines_with_store
from pdserve.verify.load.schedule import GROUPS, LoadOptions, Schedule, make_schedule
from pdserve.verify.load.traffic import Came, OnWindow, PrefixReload, SentWindow, Traffic, common_place, send
from pdserve.verify.proofs import (
    ALWAYS_RECOMPUTED,
    ENDPOINTS_CLAIM,
    INSENSITIVE,
    first_difference,
    left_behind,
    logprob_distances,
    prove_endpoints,
    read_idle_engines,
    where_to_look,
    why_not_comparable,
)
from pdserve.verify.report import Numbers, OnProof, Outcome, Proofs, Report, failed, not_proven, proven
from pdserve.verify.target import Target
from pdserve.verify.trials import Counters, Trial, alter_prompt, generate, read_counters, tokens_since


class LoadWindow(BaseModel):
    """The requests `first` to `last`, in the order in which they were sent."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    first: int
    last: int
    seconds: float
    """Since the load began, when the last of them had ended."""
    answered: int
    cancelled: int
    failed: int
    compared: int
    """Answers that were compared with one engine alone."""
    different: int
    """The number of those that differ from what the engine alone answers."""


class LoadReport(Report):
    """A Report; `windows` has when in the run answers failed or differed."""

    windows: tuple[LoadWindow, ...] = ()


def make_windows(traffic: Traffic, compared: Collection[int], different: Collection[int]) -> tuple[LoadWindow, ...]:
    """Return the windows of a load as the report has them. `compared`, `different`: numbers of requests."""
    return tuple(
        LoadWindow(
            first=window.first,
            last=window.last,
            seconds=window.seconds,
            answered=len(window.ended("answered")),
            cancelled=len(window.ended("cancelled")),
            failed=len(window.ended("failed")),
            compared=sum(window.first <= number <= window.last for number in compared),
            different=sum(window.first <= number <= window.last for number in different),
        )
        for window in traffic.windows
    )


def name_windows(traffic: Traffic, of: Collection[int], wrong: Collection[int]) -> str:
    """Return in which windows: `requests 0-49: 3 of 12; requests 100-149: 6 of 11`. Only windows with wrong ones."""
    parts = []
    for window in make_windows(traffic, of, wrong):
        if window.different:
            parts.append(f"requests {window.first}-{window.last}: {window.different} of {window.compared}")
    return "; ".join(parts)


OUTPUT_CLAIM = (
    "A sample of the answers under load equals those of one instance that computed each whole prompt itself, "
    "and another prompt gives another answer."
)


@dataclass
class ComparedAnswers:
    """Numbers of the requests whose answers were compared, and of those that differ."""

    compared: list[int] = field(default_factory=list)
    different: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class _Distance:
    """The distance of an answer from what the reference computes of a prompt."""

    differs: bool
    size: float
    """Differing tokens, or the largest difference of a logprob."""
    text: str


async def prove_output(target: Target, schedule: Schedule, traffic: Traffic, comparison: ComparedAnswers) -> Outcome:
    """Prove that the answers under load are those of the reference, and fill `comparison`. The reference is asked once
    the load is over, one prompt after the other."""
    trials = {
        request.planned.number: Trial(request.planned.prompt, target.salt(request.planned.leg), request.answer)
        for request in traffic.served
        if request.planned.compared and request.answer is not None
    }
    if not trials:
        return not_proven("no answer was there to compare: a longer load, or a larger --sample, has some")
    verify = target.plan.verify
    numbers: Numbers = {"compared": verify.output, "reference": target.reference.name, "answers compared": len(trials)}
    if verify.output == "logprobs":
        numbers["tolerance"] = verify.logprob_tolerance
    first, largest = "", 0.0
    for number, trial in trials.items():
        distance = await _distance(target, trial, trial.prompt, f"load-reference-{number}")
        comparison.compared.append(number)
        largest = max(largest, distance.size)
        if distance.differs:
            comparison.different.append(number)
            first = first or f"request {number}: {distance.text}"
    different = comparison.different
    numbers["answers that differ"] = len(different)
    numbers["share that differs"] = round(len(different) / len(trials), 4)
    numbers["largest difference"] = round(largest, 6)
    control = await _output_control(target, schedule, trials)
    numbers["control: difference"] = round(control.size, 6)
    if different:
        return failed(
            f"{len(different)} of {len(trials)} compared answers differ from one instance alone "
            f"({name_windows(traffic, comparison.compared, different)}). The first is {first}. {where_to_look(target)}",
            numbers,
        )
    if not control.differs:
        return failed(INSENSITIVE, numbers)
    return proven(numbers)


async def _output_control(target: Target, schedule: Schedule, trials: dict[int, Trial]) -> _Distance:
    """Measure how far an answer is from that to another prompt: the shortest prompt with the first chunk of another
    group must have another answer."""
    shortest = min(trials.values(), key=lambda trial: len(trial.prompt))
    other = next(
        prefix
        for prefix in map(schedule.prefix, range(GROUPS))
        if prefix[: target.chunk] != shortest.prompt[: target.chunk]
    )
    return await _distance(target, shortest, alter_prompt(shortest.prompt, other, target.chunk), "load-control")


async def _distance(target: Target, trial: Trial, prompt: tuple[int, ...], leg: str) -> _Distance:
    """Return the distance from the answer of `trial` to what the reference makes of `prompt`."""
    verify = target.plan.verify
    if verify.output == "exact":
        alone = await generate(target, prompt, leg)
        size = sum(a != b for a, b in zip(trial.answer.tokens, alone.tokens, strict=False))
        return _Distance(
            differs=trial.answer.tokens != alone.tokens,
            size=size,
            text=first_difference(f"{len(prompt)} prompt tokens", trial.answer.tokens, alone.tokens),
        )
    if len(trial.answer.logprobs) != len(trial.answer.tokens):
        return _Distance(differs=True, size=0.0, text="the answer has no logprobs although they were asked for")
    largest = max(await logprob_distances(target, trial, prompt, leg))
    return _Distance(
        differs=largest > verify.logprob_tolerance,
        size=largest,
        text=f"logprobs differ by up to {largest:.4f}, allowed are {verify.logprob_tolerance:g}",
    )


_RELOAD_CLAIM = (
    "After each time that the engines' own caches were cleared, a prompt of each group was sent alone, and its group's "
    "prefix was loaded again"
)

_Cleared = tuple[SentWindow, tuple[PrefixReload, ...]]
"""A window before which the caches were cleared, and its reloads."""


def reload_claim(target: Target) -> str:
    """Return what is claimed of reloads: where engines do not reload from the same place, one may never have had a
    prefix."""
    return f"{_RELOAD_CLAIM}." if common_place(target) else f"{_RELOAD_CLAIM} wherever it was known to be kept."


async def prove_reload(target: Target, traffic: Traffic) -> Outcome:
    if not target.plan.cache_reset_endpoint:
        return not_proven(
            "engine.cache_reset_endpoint is off in the recipe: the engines' own caches cannot be cleared, so reloads "
            "look like local hits"
        )
    cleared = [(window, window.reloads) for window in traffic.windows if window.reloads is not None]
    numbers = _reload_numbers(cleared)
    if lost := _reloads_that(cleared, "lost"):
        servers = [server.process for server in target.plan.lmcache]
        engines = [reload.engine for _, reload in lost if reload.engine] or [w.name for w in target.producers]
        logs = ", ".join(target.log(name) for name in dict.fromkeys((*servers, *engines)))
        return failed(
            f"prefixes that prompts share were computed again instead of being loaded ({_list_reloads(lost)}): they "
            f"were not stored, or they were evicted; see {logs}",
            numbers,
        )
    if traffic.not_cleared is not None:
        raise traffic.not_cleared
    if not numbers["times cleared"]:
        return not_proven(
            "no window was answered from its begin on after the caches were cleared: give --requests, or --seconds, "
            "for more than one window, or a smaller --window",
            numbers,
        )
    if reason := _why_open(target, cleared):
        return not_proven(reason, numbers)
    return proven(numbers)


def _why_open(target: Target, cleared: Sequence[_Cleared]) -> str:
    """Say why it is not known that all prefixes came back. Empty: it is known."""
    begins = [
        window.served[len(reloads)] for window, reloads in cleared if len(reloads) < min(GROUPS, len(window.served))
    ]
    if failures := [str(request.planned.number) for request in begins]:
        return f"requests that had to reload a prefix were not answered: {', '.join(failures)}"
    if uncounted := _reloads_that(cleared, "uncounted"):
        return (
            "the engines do not count where the tokens of their prompts came from or how large their blocks are, could "
            f"not be read, or have not counted a prompt in time (the first: {_list_reloads(uncounted[:1])})"
        )
    if disturbed := _reloads_that(cleared, "disturbed"):
        return (
            "others were served meanwhile, and may have loaded what looks like a prefix "
            f"({_list_reloads(disturbed)}): prove it while the deployment serves nothing else"
        )
    looked = [reload for _, reloads in cleared for reload in reloads if reload.came != "too-short"]
    if not looked:
        least = target.plan.min_load_tokens
        minimum = f"reloads below min_load_tokens ({least}) are computed" if least else "less than a block is computed"
        return f"{minimum}, as all of these prefixes are"
    if never := {reload.group for reload in looked} - {reload.group for reload in looked if reload.came == "back"}:
        return (
            f"the prefixes of {', '.join(f'group {group}' for group in sorted(never))} were asked for only where they "
            "may never have been: a prompt may go to another engine, which reloads from elsewhere. A longer load, or a "
            "smaller --window, asks more often"
        )
    return ""


def _reload_numbers(cleared: Sequence[_Cleared]) -> Numbers:
    came = Counter(reload.came for _, reloads in cleared for reload in reloads)
    expected = [reload for _, reloads in cleared for reload in reloads if reload.came not in ("new", "too-short")]
    numbers: Numbers = {
        "times cleared": sum(len(reloads) == GROUPS for _, reloads in cleared),
        "prefixes expected": len(expected),
        "prefixes loaded": came["back"],
        "tokens expected": sum(reload.wanted for reload in expected),
        "tokens loaded": sum(reload.loaded or 0 for reload in expected),
    }
    if came["new"]:
        numbers["prefixes not known to be there"] = came["new"]
    if came["too-short"]:
        numbers["prefixes too short to be loaded"] = came["too-short"]
    return numbers


def _reloads_that(cleared: Sequence[_Cleared], came: Came) -> list[tuple[SentWindow, PrefixReload]]:
    return [(window, reload) for window, reloads in cleared for reload in reloads if reload.came == came]


def _list_reloads(reloads: Sequence[tuple[SentWindow, PrefixReload]]) -> str:
    """List reloads: `requests 16-31: group 1 (cache_salt pdserve-verify-1a2b-load-1): 0 of 512 tokens by prefill-0`."""
    return "; ".join(
        f"requests {window.first}-{window.last}: group {reload.group} (cache_salt {reload.salt}): "
        f"{'?' if reload.loaded is None else reload.loaded} of {reload.wanted} tokens"
        f"{f' by {reload.engine}' if reload.engine else ''}"
        for window, reload in reloads
    )


_ANSWERED = "Every request under load whose client stayed was answered whole"
TRANSFER_CLAIM = "Under load decode had the KV of every prompt and computed none beyond what vLLM always recomputes."
CLEAN_CLAIM = (
    "After the load no request is running, KV-cache use is what it was on every engine, and LMCache holds no lock."
)
_UNCOUNTED = "the decode engines do not count where the tokens of their prompts came from, or could not be read"
_COUNT_SECONDS = 5.0
_UNLOCK_SECONDS = 15.0
_POLL_SECONDS = 0.2
_COMPUTED_A_REQUEST = 2 * ALWAYS_RECOMPUTED
"""Requests of `verify` itself, which make idle engines release blocks, count too."""


def answers_claim(target: Target) -> str:
    """Return the claim of the proof of answers. vllm-router does not count second attempts: nothing is claimed of them
    there."""
    return f"{_ANSWERED}." if target.through_router else f"{_ANSWERED}, and none of them needed a second attempt."


def prove_answers(target: Target, traffic: Traffic, options: LoadOptions) -> Outcome:
    served = traffic.served
    failures = [request for request in served if request.ended == "failed"]
    numbers: Numbers = {
        "requests": len(served),
        "concurrency": options.concurrency,
        "seed": options.seed,
        "answered": sum(request.ended == "answered" for request in served),
        "cancelled": sum(request.ended == "cancelled" for request in served),
        "failed": len(failures),
        "second attempts": traffic.failovers,
        "seconds": traffic.windows[-1].seconds if traffic.windows else 0.0,
    }
    if not served:
        return not_proven("nothing was sent within --seconds: give more of them", numbers)
    if failures:
        whole = [request.planned.number for request in served if request.ended != "cancelled"]
        given_up = "; a window had no answer at all, so the load ended there" if traffic.given_up else ""
        windows = name_windows(traffic, whole, [request.planned.number for request in failures])
        return failed(
            f"{len(failures)} of {len(whole)} requests failed ({windows}){given_up}. The first is "
            f"request {failures[0].planned.number}: {failures[0].error}. See {_logs(target)}",
            numbers,
            goes_on=not traffic.given_up,
        )
    if traffic.failovers:
        return failed(
            f"the proxy made {traffic.failovers} attempts once more on another worker: an engine failed, or a "
            f"transfer did; see {_logs(target)}",
            numbers,
            goes_on=True,
        )
    if traffic.failovers is None and not target.through_router:
        return not_proven(
            "all were answered, but how many attempts the proxy made once more could not be read before or after the "
            f"load; see {target.log('proxy')}",
            numbers,
            goes_on=True,
        )
    return proven(numbers)


async def prove_transfer(target: Target, traffic: Traffic) -> Outcome:
    """Prove the transfer from the counters of the decode engines. Decode may have a prefix in its own cache: from an
    earlier transfer. It counts each prompt whole, by source, once the first token is there. Of a request that was left
    before its first byte nobody knows whether it came so far."""
    prompts = sum(len(request.planned.prompt) for request in traffic.served if request.begun)
    until = time.monotonic() + _COUNT_SECONDS
    while True:
        after = await read_counters(target)
        received, cached, computed = (
            _on_decode(target, traffic.windows[0].before, after, source)
            for source in ("external_kv_transfer", "local_cache_hit", "local_compute")
        )
        if received is None or cached is None or computed is None:
            return not_proven(_UNCOUNTED)
        if received + cached + computed >= prompts or time.monotonic() > until:
            break
        await asyncio.sleep(_POLL_SECONDS)
    numbers: Numbers = {
        "prompt tokens": prompts,
        "received by decode": received,
        "in decode's own cache": cached,
        "computed on decode": computed,
    }
    # Window by window: in a long load the tokens that are always computed would hide some whole prompts. In a window
    # whose prompts are fewer tokens than it has requests they still would.
    ends = [*(window.before for window in traffic.windows[1:]), after]
    wrong, unread, hidden = [], [], []
    for window, end in zip(traffic.windows, ends, strict=True):
        requests = f"requests {window.first}-{window.last}"
        own = _on_decode(target, window.before, end, "local_compute")
        shortest = min((len(request.planned.prompt) for request in window.served), default=math.inf)
        if own is None:
            unread.append(requests)
        elif own > _COMPUTED_A_REQUEST * len(window.served):
            wrong.append(f"{requests}: {own}")
        elif own >= shortest:
            hidden.append(f"{requests}: {own}, a prompt has {shortest}")
    if wrong or received + cached + computed < prompts:
        return failed(
            f"of {prompts} prompt tokens decode received {received}, had {cached} in its own cache and computed "
            f"{computed} ({'; '.join(wrong) or 'no window more than it may'}): KV was not transferred, or not all of "
            f"it; see {_logs(target)}",
            numbers,
        )
    if unread:
        return not_proven(f"the counters of decode could not be read around {'; '.join(unread)}", numbers)
    if hidden:
        return not_proven(
            f"decode computed as many tokens in a window as a whole prompt has ({'; '.join(hidden)}): the one token "
            "that vLLM may compute of every prompt, or a prompt of which no KV came; a smaller --window shows which",
            numbers,
        )
    return proven(numbers)


def _on_decode(target: Target, before: Counters, after: Counters, source: str) -> int | None:
    """Return the prompt tokens of one source on all decode engines. None: one does not count them, or could not be
    read."""
    each = [tokens_since(before.engines[w.name], after.engines[w.name], source) for w in target.decoders]
    known = [count for count in each if count is not None]
    return sum(known) if len(known) == len(each) else None


async def prove_clean(target: Target, before: Mapping[str, EngineSnapshot]) -> Outcome:
    """Prove that the load has left nothing behind in engines and LMCache. `before`: what engines reported when nothing
    was sent yet."""
    if reason := why_not_comparable(before):
        return not_proven(reason)
    numbers: Numbers = {}
    left = await left_behind(target, before, numbers)
    locked = await _locked_chunks(target)
    logs = ", ".join(target.log(server.process) for server in target.plan.lmcache)
    if target.plan.lmcache:
        numbers["chunks locked in LMCache"] = locked
    if left:
        return failed(left, numbers)
    if locked is None:
        return not_proven(
            f"not every LMCache server reports within {_UNLOCK_SECONDS:g} s how many chunks loads hold; see {logs}",
            numbers,
        )
    if locked:
        return failed(
            f"{_UNLOCK_SECONDS:g} s later LMCache still holds {locked} chunks for loads that are over: they cannot be "
            f"evicted. Others use the deployment, or locks of cancelled requests leak; see {logs}",
            numbers,
        )
    return proven(numbers)


async def _locked_chunks(target: Target) -> int | None:
    """Count the chunks that LMCache keeps locked for a load, after some patience. None: a server does not report them,
    and the others hold none."""
    until = time.monotonic() + _UNLOCK_SECONDS
    while True:
        servers = [await lmcache_snapshot(server.http_url, target.client) for server in target.plan.lmcache]
        known = [server.read_locked for server in servers if server.read_locked is not None]
        held, complete = sum(known), len(known) == len(servers)
        if (complete and not held) or time.monotonic() > until:
            return held if complete or held else None
        await asyncio.sleep(_POLL_SECONDS)


def _logs(target: Target) -> str:
    return ", ".join(target.log(worker.name) for worker in (*target.decoders, *target.producers))


@dataclass(frozen=True)
class _Sent:
    """A load that is over, as its proofs look at it."""

    schedule: Schedule
    before: Mapping[str, EngineSnapshot]
    traffic: Traffic
    comparison: ComparedAnswers = field(default_factory=ComparedAnswers)


Prove = Callable[[_Sent], Awaitable[Outcome]]


async def run_load(
    plan: Plan,
    options: LoadOptions,
    *,
    engine_key: str,
    client: httpx.AsyncClient,
    on_proof: OnProof | None = None,
    on_window: OnWindow | None = None,
) -> LoadReport:
    """Run a load and its proofs. Never raises for what it sees: see Report.raise_for_status. `on_window` hears of each
    window once it was sent.

    The deployment may serve others meanwhile; proofs that need it quiet then are not-proven, or fail.
    """
    target = Target(plan, client, engine_key)
    done = Proofs(on_proof)
    alive = await done.carry_out("endpoints", ENDPOINTS_CLAIM, partial(prove_endpoints, target))
    loads: list[_Sent] = []

    async def answers() -> Outcome:
        loads.append(await _send(target, options, on_window))
        return prove_answers(target, loads[0].traffic, options)

    if alive:
        reason = "the requests that it would look at were not answered"
        alive = await done.carry_out("load-answers", answers_claim(target), answers)
    else:
        reason = "nothing was sent: not all endpoints answer"
        done.add("load-answers", answers_claim(target), not_proven(reason))
    for name, claim, prove in _applicable_proofs(target):
        if alive:
            await done.carry_out(name, claim, partial(prove, loads[0]))
        else:
            done.add(name, claim, not_proven(reason))
    windows = [make_windows(load.traffic, load.comparison.compared, load.comparison.different) for load in loads]
    return LoadReport(deployment=plan.name, proofs=done.done, windows=windows[0] if windows else ())


async def _send(target: Target, options: LoadOptions, on_window: OnWindow | None) -> _Sent:
    schedule = await make_schedule(target, options)
    before = await read_idle_engines(target)
    reloads = target.plan.cache_reset_endpoint and _keeps_kv(target.plan)
    return _Sent(schedule, before, await send(target, schedule, options, reloads=reloads, on_window=on_window))


def _applicable_proofs(target: Target) -> list[tuple[str, str, Prove]]:
    """Return the proofs that apply, in order. `load-clean` comes before the comparison, which sends requests of its
    own."""
    applicable: list[tuple[str, str, Prove]] = []
    if target.decoders:
        applicable.append(("load-transfer", TRANSFER_CLAIM, lambda sent: prove_transfer(target, sent.traffic)))
    if _keeps_kv(target.plan):
        applicable.append(("load-reload", reload_claim(target), lambda sent: prove_reload(target, sent.traffic)))
    return [
        *applicable,
        ("load-clean", CLEAN_CLAIM, lambda sent: prove_clean(target, sent.before)),
        ("load-output", OUTPUT_CLAIM, lambda sent: prove_output(target, sent.schedule, sent.traffic, sent.comparison)),
    ]


def _keeps_kv(plan: Plan) -> bool:
    """Tell whether KV is kept outside of the engines' own prefix caches."""
    return bool(plan.lmcache or engines_with_store(plan) or engines_that_offload(plan))
