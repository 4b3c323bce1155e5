"""Proofs of KV that engines keep without LMCache: `pool-stored` and `pool-reload` of a Mooncake store, and
`offload-reload` of vLLM's own offloading."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

from pdserve.observe.engine_metrics import EngineSnapshot, StoreUse
from pdserve.plan.model import Plan
from pdserve.verify.cache import clear_engines, received_meanwhile, same_output
from pdserve.verify.outcome import Outcome, failed, not_proven, proven
from pdserve.verify.report import Numbers
from pdserve.verify.target import Target
from pdserve.verify.trials import Counters, Trials, read_counters

STORED_CLAIM = "The engines stored the KV of every whole block of the prompts in the Mooncake store."
RELOAD_CLAIM = (
    "After the engines' own caches were cleared, a prompt came back from the Mooncake store, with the same output."
)
OFFLOAD_CLAIM = "After the engines' own caches were cleared, a prompt came back from host memory, with the same output."
_STORE_CLASS, _OFFLOAD_CLASS = "MooncakeStoreConnector", "OffloadingConnector"
_STORE_SECONDS = 15.0
"""Stores are asynchronous, and are counted by the engine's next step."""
_POLL_SECONDS = 0.2


@dataclass(frozen=True)
class _Keeper:
    """What a prompt is reloaded from."""

    title: str
    engines: Collection[str]
    counts_keys: bool
    """Whether its engines count what they load from it, by key."""


def engines_with_store(plan: Plan) -> tuple[str, ...]:
    return _engines(plan, _STORE_CLASS)


def engines_that_offload(plan: Plan) -> tuple[str, ...]:
    return _engines(plan, _OFFLOAD_CLASS)


async def prove_stored(target: Target, trials: Trials) -> Outcome:
    """Every key counts a block of one worker and one KV group. A hybrid model stores fewer blocks of some groups, and
    more than one key for others: less than a key a block is not proven, none at all is a failure."""
    engines = [worker for worker in target.producers if worker.name in engines_with_store(target.plan)]
    sizes = [trials.before.engines[worker.name].block_size for worker in engines]
    if not engines or None in sizes:
        return not_proven("the engines that compute prompts have no store, or do not report their block size")
    block = max(size for size in sizes if size is not None)
    wanted = sum(len(trial.prompt) // block for trial in trials.trials)
    began = time.monotonic()
    while True:
        use = _since(trials.before, await read_counters(target), [worker.name for worker in engines])
        if use is not None and (use.stored >= wanted or use.failed):
            break
        if time.monotonic() - began > _STORE_SECONDS:
            break
        for worker in engines:
            await target.nudge(worker)
        await asyncio.sleep(_POLL_SECONDS)
    if use is None:
        return not_proven("the counters of the engines with the store could not be read before or after the prompts")
    numbers: Numbers = {
        "block tokens": block,
        "blocks expected": wanted,
        "keys stored": use.stored,
        "keys failed": use.failed,
        "seconds": round(time.monotonic() - began, 2),
    }
    logs = ", ".join(target.log(worker.name) for worker in engines)
    if use.failed or not use.stored:
        return failed(f"{use.stored} keys were stored and {use.failed} failed; see {logs}", numbers)
    if use.stored < wanted:
        return not_proven(f"{use.stored} keys for {wanted} blocks: not every block is known to be stored", numbers)
    return proven(numbers)


async def prove_store_reload(target: Target, trials: Trials) -> Outcome:
    keeper = _Keeper("the Mooncake store", engines_with_store(target.plan), counts_keys=True)
    return await _prove_reload(target, trials, keeper)


async def prove_offload_reload(target: Target, trials: Trials) -> Outcome:
    keeper = _Keeper("host memory", engines_that_offload(target.plan), counts_keys=False)
    return await _prove_reload(target, trials, keeper)


async def _prove_reload(target: Target, trials: Trials, keeper: _Keeper) -> Outcome:
    """Asks for a prompt again. Memory of an engine's own is tried once more for each engine, because another one may be
    chosen; the store is common to all."""
    if not target.plan.cache_reset_endpoint:
        return not_proven(
            "engine.cache_reset_endpoint is off in the recipe: an engine's own cache cannot be cleared, so a reload "
            "looks like a local hit"
        )
    producers = [worker.name for worker in target.producers if worker.name in keeper.engines]
    trial = trials.trials[0]
    sizes = [trials.before.engines[name].block_size for name in producers]
    if not producers or None in sizes:
        return not_proven("the engines that compute prompts do not use it, or do not report their block size")
    block = max(size for size in sizes if size is not None)
    wanted = (len(trial.prompt) - 1) // block * block
    numbers: Numbers = {"tokens expected": wanted}
    for attempt in range(1 if keeper.counts_keys else len(producers) + 1):
        await clear_engines(target)
        before = await read_counters(target)
        began = time.monotonic()
        again = await target.complete(
            target.proxy_url, trial.prompt, salt=trial.salt, max_tokens=target.plan.verify.output_tokens
        )
        numbers["seconds"] = round(time.monotonic() - began, 2)
        received = await received_meanwhile(target, before, wanted)
        use = _since(before, await read_counters(target), producers) if keeper.counts_keys else None
        loaded = None if use is None else use.loaded
        numbers |= {"attempts": attempt + 1, "tokens loaded": received, "keys loaded": loaded}
        if received is None or (keeper.counts_keys and use is None):
            return not_proven(
                "the engines do not count where the tokens of their prompts came from, or could not be read", numbers
            )
        if received >= wanted and loaded != 0:
            return await same_output(target, trial, again.tokens, numbers, keeper=keeper.title)
    logs = ", ".join(target.log(name) for name in producers)
    return failed(f"a prompt that {keeper.title} has was computed again instead of being reloaded: see {logs}", numbers)


def _engines(plan: Plan, class_name: str) -> tuple[str, ...]:
    return tuple(
        process.name
        for process in plan.processes
        if any(connector.class_name == class_name for connector in process.connectors)
    )


def _since(before: Counters, after: Counters, names: Collection[str]) -> StoreUse | None:
    """Of these engines together. None: one of them could not be read."""
    if not all(counters.engines[name].reachable for counters in (before, after) for name in names):
        return None

    def growth(count: Callable[[StoreUse], int]) -> int:
        return sum(_count(after.engines[name], count) - _count(before.engines[name], count) for name in names)

    return StoreUse(
        stored=growth(lambda use: use.stored),
        failed=growth(lambda use: use.failed),
        loaded=growth(lambda use: use.loaded),
    )


def _count(engine: EngineSnapshot, count: Callable[[StoreUse], int]) -> int:
    return 0 if engine.store is None else count(engine.store)
