"""Proof `clean`: requests that end in every way leave nothing behind."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing

import httpx

from pdserve.errors import VerifyError
from pdserve.observe.engine_metrics import EngineSnapshot, engine_snapshot
from pdserve.verify.outcome import Outcome, failed, not_proven, proven
from pdserve.verify.prompts import longest_answer
from pdserve.verify.report import Numbers
from pdserve.verify.target import Target, describe
from pdserve.verify.trials import Trials

CLAIM = (
    "A streamed request, a plain one and two that were cancelled leave no running request, "
    "and KV-cache use returns to its earlier value on every engine."
)
_LONGEST_WAIT_SECONDS = 30.0
_QUIET_SECONDS = 3.0
_QUIET_READINGS = 2
_POLL_SECONDS = 0.2
_DONE = "[DONE]"
_LONG_ANSWER_TOKENS = 512
"""Of the requests that are cancelled: long enough to be running still."""
_CLOSE_AFTER_SECONDS = 0.05
_USAGE_SLACK = 1e-9
"""For rounding only: one block of a large cache is a millionth of it."""


async def prove(target: Target, trials: Trials) -> Outcome:
    prompt = trials.trials[0].prompt
    before = await _quiet(target)
    if busy := [name for name, snapshot in before.items() if snapshot.unfinished]:
        return not_proven(f"{', '.join(busy)} also serve others: what they leave looks like what these requests leave")
    if silent := [
        name for name, snapshot in before.items() if snapshot.unfinished is None or snapshot.kv_cache_usage is None
    ]:
        return not_proven(f"{', '.join(silent)} report no running requests or no KV use (statistics off?)")

    long = await longest_answer(target, prompt, _LONG_ANSWER_TOKENS)
    numbers: Numbers = {"streamed chunks": await _streamed(target, prompt)}
    plain = await target.complete(target.proxy_url, prompt, salt=target.salt("plain"), max_tokens=8)
    numbers["plain tokens"] = len(plain.tokens)
    numbers["cancelled after first chunk"] = await _cancel_after_first_chunk(target, prompt, long)
    numbers["cancelled before first byte"] = await _cancel_before_first_byte(target, prompt, long)

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
    if left:
        return failed(
            f"{seconds:g} s later still not as before: {', '.join(left)}. A request was not aborted with its client, "
            f"prefill keeps KV that no decode fetches, or others use the deployment: see {target.log('proxy')}",
            numbers,
        )
    return proven(numbers)


async def _streamed(target: Target, prompt: tuple[int, ...]) -> int:
    """Reads a stream to its end and returns its number of chunks."""
    chunks = [chunk async for chunk in _stream(target, prompt, "stream", 8)]
    if len(chunks) < 2 or chunks[-1] != _DONE:
        raise VerifyError(f"a stream of {len(chunks)} chunks ended without {_DONE}", where=target.proxy_url)
    return len(chunks) - 1


async def _cancel_after_first_chunk(target: Target, prompt: tuple[int, ...], tokens: int) -> bool:
    """False: the answer was over already."""
    async with aclosing(_stream(target, prompt, "cancelled", tokens)) as chunks:
        async for chunk in chunks:
            return chunk != _DONE
    return False


async def _cancel_before_first_byte(target: Target, prompt: tuple[int, ...], tokens: int) -> bool:
    """Not streamed: no byte comes before the whole answer. False: the engine was faster than we are."""
    body = target.body(prompt, salt=target.salt("abandoned"), max_tokens=tokens)
    try:
        async with asyncio.timeout(_CLOSE_AFTER_SECONDS):
            await target.client.post(
                f"{target.proxy_url}/v1/completions",
                json=body,
                headers=target.headers(target.proxy_url),
                timeout=target.plan.canary_seconds,
            )
    except TimeoutError:
        return True
    except httpx.HTTPError as error:
        raise VerifyError(
            f"a request failed before it was cancelled: {describe(error)}", where=target.proxy_url
        ) from error
    return False


async def _stream(target: Target, prompt: tuple[int, ...], leg: str, tokens: int) -> AsyncGenerator[str, None]:
    """The data of each server-sent event. Raises VerifyError for an error, also for one in the middle."""
    body = target.body(prompt, salt=target.salt(leg), max_tokens=tokens, stream=True)
    url, seconds = f"{target.proxy_url}/v1/completions", target.plan.canary_seconds
    try:
        async with (
            asyncio.timeout(seconds),
            target.client.stream("POST", url, json=body, headers=target.headers(url), timeout=seconds) as response,
        ):
            if response.status_code != 200:
                text = (await response.aread()).decode(errors="replace")
                raise VerifyError(f"a stream was answered {response.status_code}: {text[:300]}", where=url)
            async for line in response.aiter_lines():
                if line.startswith('data: {"error"'):
                    raise VerifyError(f"a stream ended with an error: {line[:300]}", where=url)
                if line.startswith("data: "):
                    yield line.removeprefix("data: ")
    except TimeoutError as error:
        raise VerifyError(f"a stream did not end within {seconds:g} s", where=url) from error
    except httpx.HTTPError as error:
        raise VerifyError(f"a stream broke off: {describe(error)}", where=url) from error


async def _quiet(target: Target) -> dict[str, EngineSnapshot]:
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
