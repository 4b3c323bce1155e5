"""Proofs of a load besides its output and its reloads: `load-answers`, `load-transfer`, `load-clean`."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping

from pdserve.observe.engine_metrics import EngineSnapshot, lmcache_snapshot
from pdserve.verify import cleanliness
from pdserve.verify.load.options import LoadOptions
from pdserve.verify.load.traffic import Traffic
from pdserve.verify.load.windows import when
from pdserve.verify.outcome import Outcome, failed, not_proven, proven
from pdserve.verify.report import Numbers
from pdserve.verify.target import Target
from pdserve.verify.transfer import ALWAYS_RECOMPUTED
from pdserve.verify.trials import Counters, read_counters, tokens_since

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
    """vllm-router does not count second attempts: nothing is claimed of them there."""
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
        return failed(
            f"{len(failures)} of {len(whole)} requests failed "
            f"({when(traffic, whole, [request.planned.number for request in failures])}){given_up}. The first is "
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
    """From the counters of the decode engines. Decode may have a prefix in its own cache: from an earlier transfer. It
    counts each prompt whole, by source, once the first token is there. Of a request that was left before its first byte
    nobody knows whether it came so far."""
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
    """Prompt tokens of one source on all decode engines. None: one does not count them, or could not be read."""
    each = [tokens_since(before.engines[w.name], after.engines[w.name], source) for w in target.decoders]
    known = [count for count in each if count is not None]
    return sum(known) if len(known) == len(each) else None


async def prove_clean(target: Target, before: Mapping[str, EngineSnapshot]) -> Outcome:
    """`before`: what engines reported when nothing was sent yet."""
    if reason := cleanliness.why_not_comparable(before):
        return not_proven(reason)
    numbers: Numbers = {}
    left = await cleanliness.left_behind(target, before, numbers)
    locked = await _locked(target)
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


async def _locked(target: Target) -> int | None:
    """Chunks that LMCache keeps locked for a load, after some patience. None: a server does not report them, and the
    others hold none."""
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
