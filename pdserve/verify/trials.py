"""The requests through the proxy that several proofs look at."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.observe.engine_metrics import EngineSnapshot, LmcacheSnapshot, engine_snapshot, lmcache_snapshot
from pdserve.verify.completion import Completion
from pdserve.verify.prompts import make_prompts
from pdserve.verify.target import Target

_COUNT_SECONDS = 2.0
_POLL_SECONDS = 0.1


@dataclass(frozen=True)
class Trial:
    """One prompt, sent through the proxy under a cache_salt that nothing has seen before."""

    prompt: tuple[int, ...]
    salt: str
    answer: Completion


@dataclass(frozen=True)
class Counters:
    """What engines (by process name) and LMCache servers report at one moment."""

    engines: dict[str, EngineSnapshot]
    lmcache: tuple[LmcacheSnapshot, ...]

    @property
    def objects(self) -> int | None:
        """Of all servers together. None: one could not be read."""
        return _together([server.objects for server in self.lmcache])

    @property
    def bytes_used(self) -> int | None:
        """As `objects`."""
        return _together([server.bytes_used for server in self.lmcache])


@dataclass(frozen=True)
class Trials:
    """All of them, and the counters around them."""

    trials: tuple[Trial, ...]
    before: Counters
    after: Counters

    def received(self, name: str) -> int | None:
        """Prompt tokens whose KV an engine received meanwhile, for whomever."""
        return received_since(self.before.engines[name], self.after.engines[name])

    def computed(self, name: str) -> int | None:
        """Prompt tokens that an engine computed meanwhile, for whomever."""
        return tokens_since(self.before.engines[name], self.after.engines[name], "local_compute")


def received_since(before: EngineSnapshot, after: EngineSnapshot) -> int | None:
    """None: the engine does not count them, or could not be read. A counter that is not there yet counts as zero."""
    if not before.reachable or not after.reachable or after.received_tokens is None:
        return None
    return after.received_tokens - (before.received_tokens or 0)


def tokens_since(before: EngineSnapshot, after: EngineSnapshot, source: str) -> int | None:
    """Prompt tokens of one source. None: the engine does not count them, or could not be read."""
    if not before.reachable or after.prompt_tokens is None:
        return None
    return after.prompt_tokens[source] - (before.prompt_tokens or {}).get(source, 0)


def _together(counts: Sequence[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None


async def read_counters(target: Target) -> Counters:
    engines = {w.name: await engine_snapshot(w.url, target.client) for w in target.plan.proxy.workers}
    servers = tuple([await lmcache_snapshot(s.http_url, target.client) for s in target.plan.lmcache])
    return Counters(engines, servers)


async def run_trials(target: Target) -> Trials:
    """Twice as many prompts as the larger role has instances, one after the other: batching must not change the
    result, and a policy that takes instances in turn reaches all of them."""
    count = 2 * max(len(target.producers), len(target.decoders), 1)
    prompts = await make_prompts(target, count)
    logprobs = {"logprobs": 1} if target.plan.verify.output == "logprobs" else {}
    before = await read_counters(target)
    trials = []
    for number, prompt in enumerate(prompts):
        salt = target.salt(f"trial-{number}")
        answer = await target.complete(
            target.proxy_url, prompt, salt=salt, max_tokens=target.plan.verify.output_tokens, **logprobs
        )
        trials.append(Trial(prompt, salt, answer))
    return await _counted(target, tuple(trials), before)


async def _counted(target: Target, trials: tuple[Trial, ...], before: Counters) -> Trials:
    """Engines count a little after they answer: waits for their counters, but not for long."""
    until = time.monotonic() + _COUNT_SECONDS
    while True:
        done = Trials(trials, before, await read_counters(target))
        computed = sum(done.computed(worker.name) or 0 for worker in target.producers)
        received = sum(done.received(worker.name) or 0 for worker in target.decoders)
        wanted = sum(len(trial.prompt) for trial in trials)
        enough = computed >= wanted and (received >= wanted or not target.decoders)
        if enough or time.monotonic() > until:
            return done
        await asyncio.sleep(_POLL_SECONDS)
