"""Proof `clean`: requests that end in every way leave nothing behind."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

from pdserve.observe.engine_metrics import EngineSnapshot, engine_snapshot
from pdserve.verify.outcome import Outcome, failed, not_proven, proven
from pdserve.verify.prompts import longest_answer
from pdserve.verify.report import Numbers
from pdserve.verify.streams import cancel_after_first_chunk, cancel_before_first_byte, read_stream
from pdserve.verify.target import Target
from pdserve.verify.trials import Trials

CLAIM = (
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


async def prove(target: Target, trials: Trials) -> Outcome:
    prompt = trials.trials[0].prompt
    before = await quiet(target)
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
    """What engines still have that they had not `before`, as a reason; empty once they are as before. Adds to
    `numbers`."""
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
    """Why it cannot be seen what requests leave behind; empty: it can."""
    if busy := [name for name, snapshot in before.items() if snapshot.unfinished]:
        return f"{', '.join(busy)} also serve others: what they leave looks like what these requests leave"
    if silent := [
        name for name, snapshot in before.items() if snapshot.unfinished is None or snapshot.kv_cache_usage is None
    ]:
        return f"{', '.join(silent)} report no running requests or no KV use (statistics off?)"
    return ""


async def quiet(target: Target) -> dict[str, EngineSnapshot]:
    """What engines report when none of our requests runs: the lowest of a few readings, because blocks of the last
    requests are released a step after their answers."""
    lowest = await _settle(target, None, _QUIET_SECONDS)
    for _ in range(_QUIET_READINGS):
        for name, snapshot in (await _nudged(target)).items():
            if snapshot.reachable and _usage(snapshot) < _usage(lowest[name]):
                lowest[name] = snapshot
    return lowest


async def _settle(
    target: Target, wanted: Mapping[str, EngineSnapshot] | None, seconds: float
) -> dict[str, EngineSnapshot]:
    """Reads until all engines are as clean as `wanted` (None: run nothing), or the time is over."""
    until = time.monotonic() + seconds
    while True:
        now = await _nudged(target)
        if time.monotonic() > until or all(
            _is_clean(snapshot, wanted[name] if wanted else None) for name, snapshot in now.items()
        ):
            return now
        await asyncio.sleep(_POLL_SECONDS)


async def _nudged(target: Target) -> dict[str, EngineSnapshot]:
    """Gauges are set by engine steps, and an idle engine makes none: so one token each first."""
    now: dict[str, EngineSnapshot] = {}
    for worker in target.plan.proxy.workers:
        await target.nudge(worker)
        now[worker.name] = await engine_snapshot(worker.url, target.client)
    return now


def _is_clean(now: EngineSnapshot, before: EngineSnapshot | None) -> bool:
    return now.unfinished == 0 and (before is None or _usage(now) <= _usage(before) + _USAGE_SLACK)


def _usage(snapshot: EngineSnapshot) -> float:
    return 1.0 if snapshot.kv_cache_usage is None else snapshot.kv_cache_usage
