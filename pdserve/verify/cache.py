"""Prove that KV is kept outside of the engines, and comes back.

The proofs are `stored` and `reload` of LMCache, `pool-stored` and `pool-reload` of a Mooncake store, and
`offload-reload` of vLLM's own offloading.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

from pdserve.errors import NotProvenError
from pdserve.observe.metrics import EngineSnapshot, SaltUse, StoreUse, lmcache_salt_use
from pdserve.plan.model import Plan
from pdserve.verify.report import Numbers, Outcome, failed, not_proven, proven
from pdserve.verify.target import Target
from pdserve.verify.trials import Counters, Trial, Trials, force, read_counters, received_since

STORED_CLAIM = "LMCache stored every whole chunk of the prompts."
RELOAD_CLAIM = "After the engines' own caches were cleared, a prompt came back from LMCache, with the same output."
_STORE_SECONDS = 15.0
"""Stores are asynchronous: some are still on their way when the answer is there."""
_READ_SECONDS = 5.0
_CLEAR_SECONDS = 10.0
_POLL_SECONDS = 0.1
_RESET = "/reset_prefix_cache?reset_external=false"


async def prove_stored(target: Target, trials: Trials) -> Outcome:
    chunks = len(trials.trials) * _whole_chunks(target, trials.trials[0])
    began = time.monotonic()
    while True:
        use = await _use(target, {trial.salt for trial in trials.trials})
        after = await read_counters(target)
        # Without counters by salt: growth since before the trials, of all clients' objects.
        stored = _more(trials.before.objects, after.objects) if use is None else use.chunks_written
        parts = _parts(target, after)
        wanted = None if parts is None else chunks * parts
        if (
            stored is not None and wanted is not None and stored >= wanted
        ) or time.monotonic() - began > _STORE_SECONDS:
            break
        await asyncio.sleep(_POLL_SECONDS)
    numbers: Numbers = {
        "chunk tokens": target.chunk,
        "chunks expected": wanted,
        "chunks stored": stored,
        "counted by": "objects" if use is None else "cache_salt",
        "objects": f"{_count_text(trials.before.objects)} -> {_count_text(after.objects)}",
        "bytes": f"{_count_text(trials.before.bytes_used)} -> {_count_text(after.bytes_used)}",
        "seconds": round(time.monotonic() - began, 2),
    }
    if parts != 1:
        numbers["parts of a chunk"] = parts
    if stored is None:
        return not_proven("how much LMCache had stored could not be read before or after the prompts", numbers)
    if wanted is None:
        return not_proven("engines have several ranks, and LMCache does not say how many parts a chunk has", numbers)
    if stored < wanted:
        logs = ", ".join(target.log(s.process) for s in target.plan.lmcache)
        engines = ", ".join(target.log(name) for s in target.plan.lmcache for name in s.engines)
        return failed(
            f'LMCache stored {stored} of {wanted} chunks within {_STORE_SECONDS:g} s: see {logs} ("Stored") and '
            f'{engines} ("LMCache"); are all workers registered (`pdserve status`)?',
            numbers,
        )
    return proven(numbers)


async def prove_reload(target: Target, trials: Trials) -> Outcome:
    """Asks for a prompt again. Another prefill may be chosen, beside another LMCache server that has never seen the
    prompt: then it has seen it the next time."""
    if not target.plan.cache_reset_endpoint:
        return not_proven(
            "engine.cache_reset_endpoint is off in the recipe: a prefill's own cache cannot be cleared, so a reload "
            "from LMCache looks like a local hit"
        )
    trial = trials.trials[0]
    wanted = _whole_chunks(target, trial)
    if target.plan.max_tokens_per_load is not None:
        wanted = min(wanted, target.plan.max_tokens_per_load // target.chunk)
    least = target.plan.min_load_tokens or 0
    if wanted * target.chunk < least:
        return not_proven(f"reloads below min_load_tokens ({least}) are computed, and this prompt's is {wanted} chunks")
    attempts = 1 if len(target.plan.lmcache) == 1 else len(target.producers) + 1
    numbers: Numbers = {"chunks expected": wanted}
    for attempt in range(attempts):
        await clear_engines(target)
        before, use_before = await read_counters(target), await _use(target, {trial.salt})
        parts = _parts(target, before)
        began = time.monotonic()
        again = await target.complete(
            target.proxy_url, trial.prompt, salt=trial.salt, max_tokens=target.plan.verify.output_tokens
        )
        numbers["seconds"] = round(time.monotonic() - began, 2)
        received = await received_meanwhile(target, before, wanted * target.chunk)
        use_after = await _use(target, {trial.salt})
        read = use_after.chunks_read - use_before.chunks_read if use_before and use_after else None
        numbers |= {"attempts": attempt + 1, "tokens loaded": received, "chunks read from LMCache": read}
        if received is None and (read is None or parts is None):
            return not_proven("neither the engines nor LMCache report counters that could be read", numbers)
        if (received is None or received >= wanted * target.chunk) and (read is None or read >= wanted * (parts or 1)):
            return await same_output(target, trial, again.tokens, numbers)
    logs = ", ".join(target.log(name) for server in target.plan.lmcache for name in (server.process, *server.engines))
    return failed(f"a prompt that LMCache has stored was computed again instead of being reloaded: see {logs}", numbers)


async def same_output(
    target: Target, trial: Trial, tokens: tuple[int, ...], numbers: Numbers, *, keeper: str = "LMCache"
) -> Outcome:
    """Judge whether the output on reloaded KV is that of the first answer. `keeper`: what the prompt was reloaded
    from."""
    numbers["same tokens"] = tokens == trial.answer.tokens
    if tokens == trial.answer.tokens:
        return proven(numbers)
    # The tail of the prompt was computed in another batch shape than at first: a near tie may fall the other way.
    gap = (await force(target, trial.prompt, tokens, "reload")).greedy_gap
    numbers["greedy gap"] = round(gap, 6)
    if gap <= target.plan.verify.logprob_tolerance:
        return proven(numbers)
    return failed(
        f"the output on reloaded KV is not what one instance would choose (by {gap:.3f} in logprob): {keeper} "
        "returned other KV than was stored",
        numbers,
    )


async def clear_engines(target: Target) -> None:
    """Clear the prefix caches of all engines, decode's too: the KV that it works on shall be the reloaded one. LMCache
    is left alone."""
    for worker in target.plan.proxy.workers:
        until = time.monotonic() + _CLEAR_SECONDS
        while (answer := await target.post(worker.url, _RESET, {})).get("success") is not True:
            if time.monotonic() > until:
                raise NotProvenError(
                    f"the prefix cache could not be cleared: {answer}",
                    where=worker.url,
                    cause="some of its blocks are in use: by requests, or by KV that no decode has fetched",
                    todo=f"see {target.log(worker.name)}",
                )
            # Blocks of a finished transfer are released by the next step of the engine.
            await target.nudge(worker)
            await asyncio.sleep(_POLL_SECONDS)


async def received_meanwhile(target: Target, before: Counters, wanted: int) -> int | None:
    """Return the tokens that all producers loaded since; None: none of them counts, or too few were seen and not all
    could be read. Engines count a little after they answer."""
    until = time.monotonic() + _READ_SECONDS
    while True:
        now = await read_counters(target)
        pairs = [(before.engines[worker.name], now.engines[worker.name]) for worker in target.producers]
        known = [count for pair in pairs if (count := received_since(*pair)) is not None]
        if known and sum(known) >= wanted:
            return sum(known)
        read = all(first.reachable and last.reachable for first, last in pairs)
        if (read and not known) or time.monotonic() > until:
            return sum(known) if known and read else None
        await asyncio.sleep(_POLL_SECONDS)


async def _use(target: Target, salts: Collection[str]) -> SaltUse | None:
    """Return the use of all servers together; None: one does not count by salt."""
    uses = [await lmcache_salt_use(server.http_url, salts, target.client) for server in target.plan.lmcache]
    known = [use for use in uses if use is not None]
    if len(known) < len(uses):
        return None
    return SaltUse(sum(use.chunks_written for use in known), sum(use.chunks_read for use in known))


def _parts(target: Target, counters: Counters) -> int | None:
    """Return the objects that LMCache keeps of a chunk of an engine, at least, on all servers that the engine attaches
    to. None: it does not say, and the engine has several ranks, which may have KV of their own or all the same
    (MLA)."""
    of_engine: dict[str, list[int | None]] = {}
    for server, snapshot in zip(target.plan.lmcache, counters.lmcache, strict=True):
        parts = 1 if server.expected_workers <= len(server.engines) else snapshot.parts
        for engine in server.engines:
            of_engine.setdefault(engine, []).append(parts)
    known = [[count for count in counts if count is not None] for counts in of_engine.values()]
    if sum(map(len, known)) < sum(map(len, of_engine.values())):
        return None
    return min(map(sum, known), default=1)


def _more(before: int | None, after: int | None) -> int | None:
    return None if before is None or after is None else after - before


def _count_text(count: int | None) -> str:
    return "?" if count is None else str(count)


def _whole_chunks(target: Target, trial: Trial) -> int:
    return len(trial.prompt) // target.chunk


POOL_STORED_CLAIM = "The engines stored the KV of every whole block of the prompts in the Mooncake store."
POOL_RELOAD_CLAIM = (
    "After the engines' own caches were cleared, a prompt came back from the Mooncake store, with the same output."
)
OFFLOAD_CLAIM = "After the engines' own caches were cleared, a prompt came back from host memory, with the same output."
_STORE_CLASS, _OFFLOAD_CLASS = "MooncakeStoreConnector", "OffloadingConnector"


@dataclass(frozen=True)
class _Keeper:
    """The cache that a prompt is reloaded from."""

    title: str
    engines: Collection[str]
    counts_keys: bool
    """Whether its engines count what they load from it, by key."""


def engines_with_store(plan: Plan) -> tuple[str, ...]:
    return _engines(plan, _STORE_CLASS)


def engines_that_offload(plan: Plan) -> tuple[str, ...]:
    return _engines(plan, _OFFLOAD_CLASS)


async def prove_pool_stored(target: Target, trials: Trials) -> Outcome:
    """Prove that a Mooncake store has taken the prompts. Every key counts a block of one worker and one KV group. A
    hybrid model stores fewer blocks of some groups, and more than one key for others: less than a key a block is not
    proven, none at all is a failure."""
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
    """Return the use by these engines together. None: one of them could not be read."""
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
