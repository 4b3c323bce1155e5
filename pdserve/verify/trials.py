"""Make prompts of an exact length in tokens, for any tokenizer, and send those that several proofs look at.

At least two LMCache chunks, so that something is stored, and an odd number of tokens, so that no even block size
divides it: the tail that does not fill a block has to arrive as well."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.errors import NotProvenError, VerifyError
from pdserve.observe.metrics import EngineSnapshot, LmcacheSnapshot, engine_snapshot, lmcache_snapshot
from pdserve.verify.target import Completion, PossibleToken, Target, json_object, read_max_model_len, read_tokens

_TAIL = 107
_WORDS = (
    "river lantern copper seven window gravel orbit paper violet engine harbor silent marble thirty wagon "
    "meadow signal winter cabin thread hollow summit barrel amber needle forest anchor candle bridge zero"
)
_WORDS_A_PIECE = 100


async def make_prompts(target: Target, count: int) -> list[tuple[int, ...]]:
    """Make `count` different prompts, the same ones on every run. Raises NotProvenError where they do not fit the
    model."""
    length = 2 * target.chunk + _TAIL
    length += 1 - length % 2
    longest = await max_model_len(target)
    wanted = length + target.plan.verify.output_tokens + 1
    if longest is not None and wanted > longest:
        raise NotProvenError(
            f"a prompt of two chunks and its answer take {wanted} tokens, the model's limit is {longest}",
            where=target.reference.url,
            todo="raise max-model-len, or lower lmcache.chunk_size",
        )
    return [await make_tokens(target, seed, length) for seed in range(count)]


async def longest_answer(target: Target, prompt: tuple[int, ...], tokens: int) -> int:
    """Return as many tokens as the model's limit leaves, `tokens` at most."""
    longest = await max_model_len(target)
    return tokens if longest is None else min(tokens, longest - len(prompt))


def alter_prompt(prompt: tuple[int, ...], other: tuple[int, ...], chunk: int) -> tuple[int, ...]:
    """Return `prompt` with another first chunk and its own end: only its far context differs."""
    return other[:chunk] + prompt[chunk:]


async def make_tokens(target: Target, seed: int, length: int) -> tuple[int, ...]:
    """Make `length` tokens of a text that depends on `seed` alone."""
    words = random.Random(seed)  # noqa: S311 - repeatable text, not a secret
    tokens: list[int] = []
    while len(tokens) < length:
        text = " ".join(words.choices(_WORDS.split(), k=_WORDS_A_PIECE))
        tokens.extend(await _tokenize(target, text))
    return tuple(tokens[:length])


async def _tokenize(target: Target, text: str) -> tuple[int, ...]:
    url = target.reference.url
    body = {"model": target.plan.served_name, "prompt": text, "add_special_tokens": False}
    return read_tokens(await target.post(url, "/tokenize", body), url)


async def max_model_len(target: Target) -> int | None:
    """Return the engine's limit; None: it does not say, or not now. Raises VerifyError for an answer that cannot be
    read."""
    url = target.reference.url
    answer = await target.get(url, "/v1/models")
    if isinstance(answer, str) or answer.status_code != 200:
        return None
    return read_max_model_len(json_object(answer, "GET /v1/models", url), url)


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
    """The reports of engines (by process name) and LMCache servers at one moment."""

    engines: dict[str, EngineSnapshot]
    lmcache: tuple[LmcacheSnapshot, ...]

    @property
    def objects(self) -> int | None:
        """Return the objects of all servers together. None: one could not be read."""
        return _together([server.objects for server in self.lmcache])

    @property
    def bytes_used(self) -> int | None:
        """Return the bytes of all servers together. None: one could not be read."""
        return _together([server.bytes_used for server in self.lmcache])


@dataclass(frozen=True)
class Trials:
    """Holds all trials, and the counters around them."""

    trials: tuple[Trial, ...]
    before: Counters
    after: Counters

    def received(self, name: str) -> int | None:
        """Return the prompt tokens whose KV an engine received meanwhile, for whomever."""
        return received_since(self.before.engines[name], self.after.engines[name])

    def computed(self, name: str) -> int | None:
        """Return the prompt tokens that an engine computed meanwhile, for whomever."""
        return tokens_since(self.before.engines[name], self.after.engines[name], "local_compute")


def received_since(before: EngineSnapshot, after: EngineSnapshot) -> int | None:
    """Return the tokens received since; None: the engine does not count them, or could not be read. A counter that is
    not there yet counts as zero."""
    if not before.reachable or not after.reachable or after.received_tokens is None:
        return None
    return after.received_tokens - (before.received_tokens or 0)


def tokens_since(before: EngineSnapshot, after: EngineSnapshot, source: str) -> int | None:
    """Return the prompt tokens of one source. None: the engine does not count them, or could not be read."""
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
    """Send twice as many prompts as the larger role has instances, one after the other: batching must not change the
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
    return await _await_counters(target, tuple(trials), before)


async def _await_counters(target: Target, trials: tuple[Trial, ...], before: Counters) -> Trials:
    """Wait for the engines' counters, but not for long: engines count a little after they answer."""
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


@dataclass(frozen=True)
class ForcedAnswer:
    """The reference's view of given output tokens: its logprob of each, and of the token it likes best there."""

    chosen: tuple[float, ...]
    best: tuple[float, ...]

    @property
    def greedy_gap(self) -> float:
        """Return how much better than the given tokens the reference's own choices are; 0: it would choose the same."""
        return max((best - chosen for best, chosen in zip(self.best, self.chosen, strict=True)), default=0.0)


async def generate(target: Target, prompt: tuple[int, ...], leg: str) -> Completion:
    """Return what the reference answers by itself. Raises VerifyError if a cache helped it."""
    answer = await target.complete(
        target.reference.url, prompt, salt=target.salt(leg), max_tokens=target.plan.verify.output_tokens
    )
    _computed_all(target, answer)
    return answer


async def force(target: Target, prompt: tuple[int, ...], tokens: Sequence[int], leg: str) -> ForcedAnswer:
    """Have the reference read `prompt` and then `tokens`, instead of choosing its own."""
    answer = await target.complete(
        target.reference.url, prompt + tuple(tokens), salt=target.salt(leg), max_tokens=1, prompt_logprobs=1
    )
    _computed_all(target, answer)
    entries = answer.prompt_logprobs[len(prompt) :]
    if len(entries) != len(tokens):
        raise VerifyError("the reference returned no logprobs of its prompt", where=target.reference.url)
    return ForcedAnswer(
        chosen=tuple(_logprob(target, entry, token) for entry, token in zip(entries, tokens, strict=True)),
        best=tuple(max(candidate.logprob for candidate in (entry or {}).values()) for entry in entries),
    )


def _logprob(target: Target, entry: dict[str, PossibleToken] | None, token: int) -> float:
    candidate = (entry or {}).get(str(token))
    if candidate is None:
        raise VerifyError(f"the reference returned no logprob of token {token}", where=target.reference.url)
    return candidate.logprob


def _computed_all(target: Target, answer: Completion) -> None:
    # Covers the engine's own prefix cache and LMCache alike: vLLM counts tokens from a connector as cached.
    if answer.cached_tokens:
        raise VerifyError(
            f"the reference took {answer.cached_tokens} of {answer.prompt_tokens} prompt tokens from a cache",
            where=target.reference.url,
            cause="a request under a new cache_salt found KV: the engine or LMCache ignores the salt",
            todo=f"look at {target.log(target.reference.name)}; comparing cache with cache would prove nothing",
        )
