"""Send the load, window by window, and read what was reloaded between two of them.

Between two windows the engines' own caches are cleared, so that what the next one shares with earlier prompts has to
come back from LMCache.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from pdserve.errors import VerifyError
from pdserve.observe.metrics import EngineSnapshot, engine_snapshot, read_metrics, total
from pdserve.pd.telemetry.metrics_page import PREFIX
from pdserve.verify import cache
from pdserve.verify.cache import clear_engines
from pdserve.verify.load.schedule import GROUPS, LoadOptions, LoadRequest, Schedule
from pdserve.verify.report import one_line
from pdserve.verify.target import Completion, Target, cancel_after_first_chunk, cancel_before_first_byte
from pdserve.verify.trials import Counters, read_counters, received_since, tokens_since

Came = Literal["back", "lost", "new", "too-short", "disturbed", "uncounted"]
"""`lost`: it was computed again where it is known to be kept. `new`: computed where it may never have been.
`too-short`: nothing so short is reloaded. `disturbed`: others were served meanwhile, and may have loaded as much.
`uncounted`: engines do not count the prompt, or not in time, or could not be read."""
Snapshots = Mapping[str, EngineSnapshot]
"""Of the engines that compute prompts, by name."""
_SOURCES = ("local_compute", "local_cache_hit", "external_kv_transfer")
_COUNT_SECONDS = 5.0
"""Engines count a little after they answer."""
_POLL_SECONDS = 0.1
_BLOCKS = re.compile(r'"blocks_per_chunk": *(\d+)')
_THRESHOLD = re.compile(r'"store_threshold": *(\d+)')


@dataclass(frozen=True)
class PrefixReload:
    """The reload of a group's prefix, seen by one prompt that was sent alone."""

    number: int
    """The number of the request."""
    group: int
    salt: str
    wanted: int
    """Tokens of the prefix that engines reload."""
    loaded: int | None
    """Tokens that engines loaded meanwhile. None: see `uncounted`."""
    engine: str | None
    """Which one computed the prompt. None: not known."""
    came: Came


@dataclass(frozen=True)
class _Growth:
    prompts: int
    """Prompt tokens, wherever their KV came from."""
    loaded: int


class Prefixes:
    """The prefixes of a load, and where each is known to be kept."""

    def __init__(self, target: Target, schedule: Schedule) -> None:
        self._target, self._schedule = target, schedule
        self._common = common_place(target)
        self._kept: set[tuple[frozenset[str], int]] = set()
        """Place and group: a prompt of the group was answered there."""

    async def read(self) -> Snapshots:
        """Read the counters before a prompt is sent, for `look`."""
        return {
            worker.name: await engine_snapshot(worker.url, self._target.client) for worker in self._target.producers
        }

    async def look(self, planned: LoadRequest, before: Snapshots) -> PrefixReload:
        """Read the counters after the answer to a prompt that was sent alone since `before`."""
        unit, wanted, tokens = _unit(self._target, before), 0, len(planned.prompt)
        if unit:
            wanted = _reloaded_tokens(self._target, len(self._schedule.prefix(planned.group)), unit)
        growth = await self._growth(before, tokens, wanted, unit or tokens)
        engine = _engine(growth, tokens) if growth else None
        place = self._common or (place_of(self._target, engine) if engine else None)
        expected = place is not None and (place, planned.group) in self._kept
        if place is not None:
            self._kept.add((place, planned.group))
        loaded: int | None = None
        came: Came = "uncounted"
        if growth is not None and unit:
            loaded, others = _loaded_tokens(growth), _others(growth, tokens)
            # Whole units are loaded: prompts of others cannot have loaded more of them than they have.
            came = _came(wanted, loaded, others // unit * unit, expected=expected)
        return PrefixReload(planned.number, planned.group, self._target.salt(planned.leg), wanted, loaded, engine, came)

    async def _growth(self, before: Snapshots, tokens: int, wanted: int, unit: int) -> dict[str, _Growth] | None:
        """Return the growth by engine, once all together have counted so many prompt tokens. None: they do not, or not
        in time. When others are served meanwhile, `wanted` tokens are waited for: theirs may be counted before those of
        the prompt.
        """
        until = time.monotonic() + _COUNT_SECONDS
        while True:
            now, late = await self.read(), time.monotonic() > until
            grown = {name: _since(before[name], now[name]) for name in before}
            known = {name: growth for name, growth in grown.items() if growth is not None}
            if len(known) == len(grown) and (others := _others(known, tokens)) >= 0:
                if late or others < unit or _loaded_tokens(known) >= wanted:
                    return known
            elif len(known) < len(grown) and all(at[name].reachable for at in (before, now) for name in before):
                return None
            if late:
                return None
            await asyncio.sleep(_POLL_SECONDS)


def common_place(target: Target) -> frozenset[str] | None:
    """Return what all engines that compute prompts reload from. None: they do not have the same."""
    places = {place_of(target, worker.name) for worker in target.producers}
    return places.pop() if len(places) == 1 else None


def place_of(target: Target, engine: str) -> frozenset[str] | None:
    """Return what an engine reloads from, as names. None: it keeps nothing, or its ranks do not share what they
    keep."""
    plan = target.plan
    worker = next(worker for worker in target.producers if worker.name == engine)
    if plan.lmcache:
        parts = {process.name for process in plan.instance_of(engine)}
        servers = frozenset(server.process for server in plan.lmcache if not parts.isdisjoint(server.engines))
        return servers if servers and (len(servers) == 1 or worker.ranks == 1) else None
    if engine in cache.engines_with_store(plan):
        return frozenset(("the Mooncake store",))
    if engine in cache.engines_that_offload(plan) and worker.ranks == 1:
        # With a threshold of N, vLLM keeps what it has seen N times: after one prompt a prefix may not be there.
        threshold = _THRESHOLD.search(" ".join(plan.process(engine).argv))
        return frozenset((engine,)) if threshold is None or int(threshold[1]) <= 1 else None
    return None


def _unit(target: Target, engines: Snapshots) -> int | None:
    """Return the tokens of the pieces that are reloaded. None: an engine does not report the size of its blocks."""
    if target.plan.lmcache:
        return target.chunk
    units = [_piece(target, name, engine.block_size) for name, engine in engines.items()]
    return max((unit for unit in units if unit is not None), default=None) if None not in units else None


def _piece(target: Target, engine: str, block: int | None) -> int | None:
    """Return the tokens that an engine moves as one: vLLM's own offloading moves several blocks so, if told to."""
    several = None
    if engine in cache.engines_that_offload(target.plan):
        several = _BLOCKS.search(" ".join(target.plan.process(engine).argv))
    return None if block is None else block * (int(several[1]) if several else 1)


def _reloaded_tokens(target: Target, prefix: int, unit: int) -> int:
    """Return the tokens that are reloaded of a prefix of so many tokens: whole pieces, as the recipe's bounds allow. 0:
    none."""
    cap, least = target.plan.max_tokens_per_load, target.plan.min_load_tokens or 0
    tokens = (prefix if cap is None else min(prefix, cap)) // unit * unit
    return tokens if tokens >= least else 0


def _since(before: EngineSnapshot, after: EngineSnapshot) -> _Growth | None:
    """Return the growth; None: the engine does not count its prompt tokens, or could not be read."""
    loaded = received_since(before, after)
    each = [tokens_since(before, after, source) for source in _SOURCES]
    known = [count for count in each if count is not None]
    return None if loaded is None or len(known) < len(each) else _Growth(sum(known), loaded)


def _loaded_tokens(growth: Mapping[str, _Growth]) -> int:
    return sum(each.loaded for each in growth.values())


def _others(growth: Mapping[str, _Growth], tokens: int) -> int:
    """Return the prompt tokens that were counted beside those of one prompt."""
    return sum(each.prompts for each in growth.values()) - tokens


def _engine(growth: Mapping[str, _Growth], tokens: int) -> str | None:
    """Return the only engine that counted a whole prompt of so many tokens."""
    names = [name for name, each in growth.items() if each.prompts >= tokens]
    return names[0] if len(names) == 1 else None


def _came(wanted: int, loaded: int, by_others: int, *, expected: bool) -> Came:
    """Tell whether a prefix came back from the cache. `by_others`: the most that other requests can have loaded
    meanwhile."""
    if not wanted:
        return "too-short"
    if loaded - by_others >= wanted:
        return "back"
    if loaded >= wanted:
        return "disturbed"
    return "lost" if expected else "new"


Ended = Literal["answered", "cancelled", "failed"]
ENDINGS: tuple[Ended, ...] = get_args(Ended)
OnWindow = Callable[["SentWindow"], None]


@dataclass(frozen=True)
class RequestOutcome:
    """The outcome of one request."""

    planned: LoadRequest
    ended: Ended
    answer: Completion | None = None
    error: str = ""

    @property
    def begun(self) -> bool:
        """Tell whether decode has certainly counted the request's prompt: the client had at least the first token."""
        return self.ended == "answered" or (
            self.ended == "cancelled" and self.planned.ending == "left-after-first-chunk"
        )


@dataclass(frozen=True)
class SentWindow:
    """The requests `first` to `last`, by number, and when the last of them had ended."""

    first: int
    served: tuple[RequestOutcome, ...]
    before: Counters
    """At its begin."""
    seconds: float
    """Since the load began."""
    reloads: tuple[PrefixReload, ...] | None = None
    """The reloads of its first prompts, as far as they were answered. None: no cache was cleared before it."""

    @property
    def last(self) -> int:
        return self.first + len(self.served) - 1

    def ended(self, how: Ended) -> tuple[RequestOutcome, ...]:
        return tuple(served for served in self.served if served.ended == how)


@dataclass(frozen=True)
class Traffic:
    """Holds the whole load as it was sent."""

    windows: tuple[SentWindow, ...]
    failovers: int | None
    """Attempts that the proxy made once more on another worker. None: it does not count them."""
    not_cleared: VerifyError | None
    """Why the engines' caches could not be cleared."""
    given_up: bool
    """A window had no answer at all: nothing more was sent."""

    @property
    def served(self) -> tuple[RequestOutcome, ...]:
        return tuple(served for window in self.windows for served in window.served)


async def send(
    target: Target, schedule: Schedule, options: LoadOptions, *, reloads: bool, on_window: OnWindow | None
) -> Traffic:
    """Send the load, window by window. `reloads`: clear the engines' caches between windows. Each window then begins
    with a prompt of each group alone, the first one too: so it is known where the prefixes are. Never raises for what
    the deployment does."""
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
        alone: tuple[RequestOutcome, ...] = ()
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
) -> tuple[tuple[RequestOutcome, ...], tuple[PrefixReload, ...]]:
    """Send one request after the other, up to the first that is not answered: the load goes on with the others."""
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
) -> tuple[RequestOutcome, ...]:
    """Send a window's requests; return their outcomes in order of their numbers, fewer than `numbers` when the time is
    over."""
    left = iter(numbers)
    served: list[RequestOutcome] = []

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


async def _serve(target: Target, schedule: Schedule, planned: LoadRequest) -> RequestOutcome:
    try:
        if planned.ending == "whole":
            return await _send_request(target, planned)
        leg, long = planned.leg, schedule.long_answer(planned)
        if planned.ending == "left-after-first-chunk":
            left = await cancel_after_first_chunk(target, planned.prompt, leg, long)
        else:
            left = await cancel_before_first_byte(target, planned.prompt, leg, long, after=planned.leaves_after)
    except VerifyError as error:
        return RequestOutcome(planned, "failed", error=one_line(error))
    return RequestOutcome(planned, "cancelled" if left else "answered")


async def _send_request(target: Target, planned: LoadRequest) -> RequestOutcome:
    verify = target.plan.verify
    logprobs = {"logprobs": 1} if planned.compared and verify.output == "logprobs" else {}
    answer = await target.complete(
        target.proxy_url,
        planned.prompt,
        salt=target.salt(planned.leg),
        max_tokens=verify.output_tokens,
        **logprobs,
    )
    return RequestOutcome(planned, "answered", answer)


async def _failovers(target: Target) -> int | None:
    samples = await read_metrics(target.proxy_url, target.client)
    if isinstance(samples, str) or target.through_router:
        return None
    return total(samples, f"{PREFIX}failovers_total") or 0
