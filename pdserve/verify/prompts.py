"""Prompts of an exact length in tokens, for any tokenizer.

At least two LMCache chunks, so that something is stored, and an odd number of tokens, so that no even block size
divides it: the tail that does not fill a block has to arrive as well.
"""

from __future__ import annotations

import random

from pdserve.errors import NotProvenError
from pdserve.verify.completion import json_object, read_max_model_len, read_tokens
from pdserve.verify.target import Target

_TAIL = 107
_WORDS = (
    "river lantern copper seven window gravel orbit paper violet engine harbor silent marble thirty wagon "
    "meadow signal winter cabin thread hollow summit barrel amber needle forest anchor candle bridge zero"
)
_WORDS_A_PIECE = 100


async def make_prompts(target: Target, count: int) -> list[tuple[int, ...]]:
    """`count` different prompts, the same ones on every run. Raises NotProvenError where they do not fit the model."""
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
    """As many tokens as the model's limit leaves, `tokens` at most."""
    longest = await max_model_len(target)
    return tokens if longest is None else min(tokens, longest - len(prompt))


def altered(prompt: tuple[int, ...], other: tuple[int, ...], chunk: int) -> tuple[int, ...]:
    """`prompt` with another first chunk and its own end: only its far context differs."""
    return other[:chunk] + prompt[chunk:]


async def make_tokens(target: Target, seed: int, length: int) -> tuple[int, ...]:
    """`length` tokens of a text that depends on `seed` alone."""
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
    """None: the engine does not say, or not now. Raises VerifyError for an answer that cannot be read."""
    url = target.reference.url
    answer = await target.get(url, "/v1/models")
    if isinstance(answer, str) or answer.status_code != 200:
        return None
    return read_max_model_len(json_object(answer, "GET /v1/models", url), url)
