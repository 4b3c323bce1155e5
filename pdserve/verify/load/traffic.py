"""Sends the load, window by window. Between two windows the engines' own caches are cleared, so that what the next one
shares with earlier prompts has to come back from LMCache."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

from pdserve.errors import VerifyError
from pdserve.observe.engine_metrics import read_metrics, total
from pdserve.pd.telemetry.metrics_page import PREFIX
from pdserve.verify.cache import clear_engines
from pdserve.verify.completion import Completion
from pdserve.verify.load.options import GROUPS, LoadOptions
from pdserve.verify.load.reload import Prefixes, PrefixReload
from pdserve.verify.load.schedule import LoadRequest, Schedule
from pdserve.verify.proofs import one_line
from pdserve.verify.streams import cancel_after_first_chunk, cancel_before_first_byte
from pdserve.verify.target import Target
from pdserve.verify.trials import Counters, read_counters

Ended = Literal["answered", "cancelled", "failed"]
ENDINGS: tuple[Ended, ...] = get_args(Ended)
OnWindow = Callable[["SentWindow"], None]


@dataclass(frozen=True)
class Served:
    """What became of one request."""

    planned: LoadRequest
    ended: Ended
    answer: Completion | None = None
    error: str = ""

    @property
    def begun(self) -> bool:
        """Decode has certainly counted its prompt: the client had at least the first token."""
        return self.ended == "answered" or (
            self.ended == "cancelled" and self.planned.ending == "left-after-first-chunk"
        )


@dataclass(frozen=True)
class SentWindow:
    """The requests `first` to `last`, by number, and when the last of them had ended."""

    first: int
    served: tuple[Served, ...]
    before: Counters
    """At its begin."""
    seconds: float
    """Since the load began."""
    reloads: tuple[PrefixReload, ...] | None = None
    """Of the prompts at its begin, as far as they were answered. None: the caches were not cleared before it."""

    @property
    def last(self) -> int:
        return self.first + len(self.served) - 1

    def ended(self, how: Ended) -> tuple[Served, ...]:
        return tuple(served for served in self.served if served.ended == how)


@dataclass(frozen=True)
class Traffic:
    """The whole load."""

    windows: tuple[SentWindow, ...]
    failovers: int | None
    """Attempts that the proxy made once more on another worker. None: it does not count them."""
    not_cleared: VerifyError | None
    """Why the engines' caches could not be cleared."""
    given_up: bool
    """A window had no answer at all: nothing more was sent."""

    @property
    def served(self) -> tuple[Served, ...]:
        return tuple(served for window in self.windows for served in window.served)


async def send(
    target: Target, schedule: Schedule, options: LoadOptions, *, reloads: bool, on_window: OnWindow | None
) -> Traffic:
    """`reloads`: clear the engines' caches between windows. Each window then begins with a prompt of each group alone,
    the first one too: so it is known where the prefixes are. Never raises for what the deployment does."""
    failovers = await _failovers(target)
    began = time.monotonic()
    until = None if options.seconds is None else began + options.seconds
    windows: list[SentWindow] = []
    prefixes = Prefixes(target, schedule)
    not_cleared: VerifyError | None = None
    first = 0
    while (options.requests is None or first < options.requests) and (until is None or time.monotonic() < until):
        cleared = False
        if reloads and windows and not_cleared is None:
            try:
                await clear_engines(target)
                cleared = True
            except VerifyError as error:
                not_cleared = error
        last = first + options.window
        numbers = range(first, last if options.requests is None else min(last, options.requests))
        before = await read_counters(target)
        alone: tuple[Served, ...] = ()
        looked: tuple[PrefixReload, ...] = ()
        if reloads and not_cleared is None:
            alone, looked = await _send_alone(target, schedule, numbers[:GROUPS], prefixes, until)
        together = await _send_window(target, schedule, numbers[len(alone) :], options.concurrency, until)
        served = (*alone, *together)
        if not served:
            break
        seconds = round(time.monotonic() - began, 1)
        windows.append(SentWindow(first, served, before, seconds, looked if cleared else None))
        if on_window:
            on_window(windows[-1])
        if not windows[-1].ended("answered"):
            break
        first += len(served)
    after = await _failovers(target)
    return Traffic(
        windows=tuple(windows),
        failovers=None if after is None or failovers is None else after - failovers,
        not_cleared=not_cleared,
        given_up=bool(windows) and not windows[-1].ended("answered"),
    )


async def _send_alone(
    target: Target, schedule: Schedule, numbers: range, prefixes: Prefixes, until: float | None
) -> tuple[tuple[Served, ...], tuple[PrefixReload, ...]]:
    """One after the other, up to the first that is not answered: the load goes on with the others."""
    served, reloads = [], []
    for number in numbers:
        if until is not None and time.monotonic() >= until:
            break
        before = await prefixes.read()
        served.append(await _serve(target, schedule, schedule.planned(number)))
        if served[-1].ended != "answered":
            break
        reloads.append(await prefixes.look(served[-1].planned, before))
    return tuple(served), tuple(reloads)


async def _send_window(
    target: Target, schedule: Schedule, numbers: range, concurrency: int, until: float | None
) -> tuple[Served, ...]:
    """In order of their numbers; fewer than `numbers` when the time is over."""
    left = iter(numbers)
    served: list[Served] = []

    async def client() -> None:
        while until is None or time.monotonic() < until:
            number = next(left, None)
            if number is None:
                return
            served.append(await _serve(target, schedule, schedule.planned(number)))

    async with asyncio.TaskGroup() as clients:
        for _ in range(concurrency):
            clients.create_task(client())
    return tuple(sorted(served, key=lambda request: request.planned.number))


async def _serve(target: Target, schedule: Schedule, planned: LoadRequest) -> Served:
    try:
        if planned.ending == "whole":
            return await _answered(target, planned)
        leg, long = planned.leg, schedule.long_answer(planned)
        if planned.ending == "left-after-first-chunk":
            left = await cancel_after_first_chunk(target, planned.prompt, leg, long)
        else:
            left = await cancel_before_first_byte(target, planned.prompt, leg, long, after=planned.leaves_after)
    except VerifyError as error:
        return Served(planned, "failed", error=one_line(error))
    return Served(planned, "cancelled" if left else "answered")


async def _answered(target: Target, planned: LoadRequest) -> Served:
    verify = target.plan.verify
    logprobs = {"logprobs": 1} if planned.compared and verify.output == "logprobs" else {}
    answer = await target.complete(
        target.proxy_url,
        planned.prompt,
        salt=target.salt(planned.leg),
        max_tokens=verify.output_tokens,
        **logprobs,
    )
    return Served(planned, "answered", answer)


async def _failovers(target: Target) -> int | None:
    samples = await read_metrics(target.proxy_url, target.client)
    if isinstance(samples, str) or target.through_router:
        return None
    return total(samples, f"{PREFIX}failovers_total") or 0
