"""Whether the prefix of each group comes back after the engines' own caches were cleared: by one prompt of the group,
sent alone. Tokens that other requests load at the same time are not told apart from those of a prefix."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from pdserve.observe.engine_metrics import EngineSnapshot, engine_snapshot
from pdserve.verify import pool
from pdserve.verify.load.schedule import LoadRequest, Schedule
from pdserve.verify.target import Target
from pdserve.verify.trials import received_since, tokens_since

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
    """What became of a group's prefix, by one prompt that was sent alone."""

    number: int
    """Of the request."""
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
        """Before a prompt is sent, for `look`."""
        return {
            worker.name: await engine_snapshot(worker.url, self._target.client) for worker in self._target.producers
        }

    async def look(self, planned: LoadRequest, before: Snapshots) -> PrefixReload:
        """After the answer to a prompt that was sent alone since `before`."""
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
            loaded, others = _loaded(growth), _others(growth, tokens)
            # Whole units are loaded: prompts of others cannot have loaded more of them than they have.
            came = _came(wanted, loaded, others // unit * unit, expected=expected)
        return PrefixReload(planned.number, planned.group, self._target.salt(planned.leg), wanted, loaded, engine, came)

    async def _growth(self, before: Snapshots, tokens: int, wanted: int, unit: int) -> dict[str, _Growth] | None:
        """By engine, once all together have counted so many prompt tokens. None: they do not, or not in time. When
        others are served meanwhile, `wanted` tokens are waited for: theirs may be counted before those of the prompt.
        """
        until = time.monotonic() + _COUNT_SECONDS
        while True:
            now, late = await self.read(), time.monotonic() > until
            grown = {name: _since(before[name], now[name]) for name in before}
            known = {name: growth for name, growth in grown.items() if growth is not None}
            if len(known) == len(grown) and (others := _others(known, tokens)) >= 0:
                if late or others < unit or _loaded(known) >= wanted:
                    return known
            elif len(known) < len(grown) and all(at[name].reachable for at in (before, now) for name in before):
                return None
            if late:
                return None
            await asyncio.sleep(_POLL_SECONDS)


def common_place(target: Target) -> frozenset[str] | None:
    """What all engines that compute prompts reload from. None: they do not have the same."""
    places = {place_of(target, worker.name) for worker in target.producers}
    return places.pop() if len(places) == 1 else None


def place_of(target: Target, engine: str) -> frozenset[str] | None:
    """What an engine reloads from, as names. None: it keeps nothing, or its ranks do not share what they keep."""
    plan = target.plan
    worker = next(worker for worker in target.producers if worker.name == engine)
    if plan.lmcache:
        parts = {process.name for process in plan.instance_of(engine)}
        servers = frozenset(server.process for server in plan.lmcache if not parts.isdisjoint(server.engines))
        return servers if servers and (len(servers) == 1 or worker.ranks == 1) else None
    if engine in pool.engines_with_store(plan):
        return frozenset(("the Mooncake store",))
    if engine in pool.engines_that_offload(plan) and worker.ranks == 1:
        # With a threshold of N, vLLM keeps what it has seen N times: after one prompt a prefix may not be there.
        threshold = _THRESHOLD.search(" ".join(plan.process(engine).argv))
        return frozenset((engine,)) if threshold is None or int(threshold[1]) <= 1 else None
    return None


def _unit(target: Target, engines: Snapshots) -> int | None:
    """Tokens of the pieces that are reloaded. None: an engine does not report the size of its blocks."""
    if target.plan.lmcache:
        return target.chunk
    units = [_piece(target, name, engine.block_size) for name, engine in engines.items()]
    return max((unit for unit in units if unit is not None), default=None) if None not in units else None


def _piece(target: Target, engine: str, block: int | None) -> int | None:
    """vLLM's own offloading moves several blocks as one, if told to."""
    several = None
    if engine in pool.engines_that_offload(target.plan):
        several = _BLOCKS.search(" ".join(target.plan.process(engine).argv))
    return None if block is None else block * (int(several[1]) if several else 1)


def _reloaded_tokens(target: Target, prefix: int, unit: int) -> int:
    """Of a prefix of so many tokens: whole pieces, as the recipe's bounds allow. 0: none."""
    cap, least = target.plan.max_tokens_per_load, target.plan.min_load_tokens or 0
    tokens = (prefix if cap is None else min(prefix, cap)) // unit * unit
    return tokens if tokens >= least else 0


def _since(before: EngineSnapshot, after: EngineSnapshot) -> _Growth | None:
    """None: the engine does not count its prompt tokens, or could not be read."""
    loaded = received_since(before, after)
    each = [tokens_since(before, after, source) for source in _SOURCES]
    known = [count for count in each if count is not None]
    return None if loaded is None or len(known) < len(each) else _Growth(sum(known), loaded)


def _loaded(growth: Mapping[str, _Growth]) -> int:
    return sum(each.loaded for each in growth.values())


def _others(growth: Mapping[str, _Growth], tokens: int) -> int:
    """Prompt tokens beside those of the prompt."""
    return sum(each.prompts for each in growth.values()) - tokens


def _engine(growth: Mapping[str, _Growth], tokens: int) -> str | None:
    """The only one that counted a whole prompt of so many tokens."""
    names = [name for name, each in growth.items() if each.prompts >= tokens]
    return names[0] if len(names) == 1 else None


def _came(wanted: int, loaded: int, by_others: int, *, expected: bool) -> Came:
    """`by_others`: the most that other requests can have loaded meanwhile."""
    if not wanted:
        return "too-short"
    if loaded - by_others >= wanted:
        return "back"
    if loaded >= wanted:
        return "disturbed"
    return "lost" if expected else "new"
