"""Choose the requests of a load: a pure function of a seed and the request's number.

Prompts have one of a few prefixes, so that caches are used by many requests at once, and tails of mixed length, most of
them short. Some prompts come once more, some requests are left by their client.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from typing import Literal

from pdserve.errors import NotProvenError
from pdserve.verify.target import Target
from pdserve.verify.trials import make_tokens, max_model_len

GROUPS = 4
"""Prefixes that prompts share."""


@dataclass(frozen=True)
class LoadOptions:
    """Holds the options of a load. It ends with the first of `requests` and `seconds` that is reached."""

    concurrency: int = 8
    requests: int | None = 200
    seconds: float | None = None
    window: int = 50
    """Requests between two reloads, and of each line of the report."""
    sample: float = 0.25
    """Share of the answers that are compared with one engine alone."""
    longest_prompt: int = 2048
    seed: int = 0


Ending = Literal["whole", "left-after-first-chunk", "left-before-first-byte"]

_POOL_TOKENS = 2000
_SHORTEST_TAIL = 16
_LONGEST_PREFIX_CHUNKS = 2
_REPEATED, _LEFT = 1 / 5, 1 / 8
_LEAVES_AFTER_SECONDS = (0.005, 0.5)
"""In the queue, during prefill, during the transfer, during decode: all of them happen."""
_LONG_ANSWER_TOKENS = 512
"""Of requests that are left: long enough to be running still."""


@dataclass(frozen=True)
class LoadRequest:
    """One request of the load."""

    number: int
    group: int
    prompt: tuple[int, ...]
    ending: Ending
    leaves_after: float
    """Seconds, of a request that is left before its first byte."""
    compared: bool

    @property
    def leg(self) -> str:
        """Return the part of its salt by which prompts with the same prefix share caches."""
        return f"load-{self.group}"


@dataclass(frozen=True)
class Schedule:
    """Makes all requests of a load, by number."""

    pool: tuple[int, ...]
    """Tokens that prompts are made of."""
    chunk: int
    longest: int
    """Tokens of a prompt."""
    model_limit: int | None
    window: int
    sample: float
    seed: int

    def planned(self, number: int) -> LoadRequest:
        chance = self._chance(number)
        place = number % self.window
        # The first of each group in a window reloads the prefix: it must be a prompt of that group, and answered.
        group = place if place < GROUPS else chance.randrange(GROUPS)
        prefix = self.prefix(group)
        tail = round(math.exp(chance.uniform(math.log(_SHORTEST_TAIL), math.log(self.longest - len(prefix)))))
        mine = LoadRequest(
            number=number,
            group=group,
            prompt=prefix + tuple(chance.choices(self.pool, k=tail)),
            ending="whole",
            leaves_after=chance.uniform(*_LEAVES_AFTER_SECONDS),
            compared=chance.random() < self.sample or place == 0,
        )
        if place < GROUPS:
            return mine
        if chance.random() < _LEFT:
            ending: Ending = chance.choice(("left-after-first-chunk", "left-before-first-byte"))
            return replace(mine, ending=ending, compared=False)
        if chance.random() < _REPEATED:
            earlier = self.planned(number - 1 - chance.randrange(min(number, self.window)))
            return replace(mine, group=earlier.group, prompt=earlier.prompt)
        return mine

    def prefix(self, group: int) -> tuple[int, ...]:
        """Return the prefix of a group: whole chunks, one or more; of some groups more than of others."""
        fits = (self.longest - _SHORTEST_TAIL) // self.chunk
        chunks = min(1 + group % _LONGEST_PREFIX_CHUNKS, fits)
        return tuple(self._chance(f"prefix-{group}").choices(self.pool, k=chunks * self.chunk))

    def long_answer(self, planned: LoadRequest) -> int:
        """Return the tokens of the answer to a request that is left."""
        if self.model_limit is None:
            return _LONG_ANSWER_TOKENS
        return min(_LONG_ANSWER_TOKENS, self.model_limit - len(planned.prompt))

    def _chance(self, of: object) -> random.Random:
        return random.Random(f"{self.seed}-{of}")  # noqa: S311 - repeatable prompts, not a secret


async def make_schedule(target: Target, options: LoadOptions) -> Schedule:
    """Make the schedule of a load: its pool of tokens, its chunks, its longest prompt. Raises NotProvenError where the
    model, or `longest_prompt`, leaves no room for a prompt with a shared chunk."""
    limit = await max_model_len(target)
    longest = options.longest_prompt
    if limit is not None:
        longest = min(longest, limit - target.plan.verify.output_tokens - 1)
    least = target.chunk + _SHORTEST_TAIL
    if longest < least:
        raise NotProvenError(
            f"a prompt with one shared chunk takes {least} tokens, {longest} are allowed",
            where=target.reference.url,
            todo=f"give --longest-prompt {least} or more; or raise max-model-len, or lower lmcache.chunk_size",
        )
    return Schedule(
        pool=await make_tokens(target, options.seed, _POOL_TOKENS),
        chunk=target.chunk,
        longest=longest,
        model_limit=limit,
        window=options.window,
        sample=options.sample,
        seed=options.seed,
    )
