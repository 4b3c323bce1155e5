"""The clients: one that does nothing wrong, and those that send what engines reject or fail with."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
_WORDS = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa", "lambda", "mu"]
_SECONDS = 120.0


@dataclass
class Innocent:
    """What the client that does nothing wrong has got."""

    sent: int = 0
    good: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)
    """Of the good ones."""


@dataclass
class Hostile:
    """What the others have got, by kind and status."""

    answers: Counter[tuple[str, str]] = field(default_factory=Counter)


Body = Callable[[random.Random], tuple[str, dict[str, Any]]]


def good(model: str) -> Body:
    """A new prompt each time, so that no cache answers; every third is a stream."""

    def body(rng: random.Random) -> tuple[str, dict[str, Any]]:
        prompt = " ".join(rng.choices(_WORDS, k=60))
        return COMPLETIONS, {"model": model, "prompt": prompt, "max_tokens": 8, "stream": rng.random() < 1 / 3}

    return body


def too_long(model: str) -> Body:
    """Text, of which only a tokenizer can say how long it is."""
    text = "hello world " * 20_000
    return lambda _: (CHAT, _chat(model, content=text))


def no_message(model: str) -> Body:
    return lambda _: (CHAT, _chat(model) | {"messages": []})


def wrong_model(_: str) -> Body:
    return lambda _: (CHAT, _chat("nobody-serves-this"))


def refused_by_decode(model: str) -> Body:
    """Prefill's leg has no such field: it computes the prompt."""

    def body(rng: random.Random) -> tuple[str, dict[str, Any]]:
        return CHAT, _chat(model, content=" ".join(rng.choices(_WORDS, k=60))) | {"stop": ["a"] * 50}

    return body


def poison(model: str) -> Body:
    """vLLM 0.32 answers 500 to both."""

    def body(rng: random.Random) -> tuple[str, dict[str, Any]]:
        fault = rng.choice(({"structured_outputs": "x"}, {"stream_interval": 10**30}))
        return CHAT, _chat(model) | fault

    return body


def _chat(model: str, content: str = "hi") -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": content}], "max_tokens": 4}


async def innocent(client: httpx.AsyncClient, body: Body, rate: float, until: float, got: Innocent) -> None:
    rng = random.Random(1)  # noqa: S311  (the same requests in every run)

    async def ask() -> None:
        path, document = body(rng)
        got.sent += 1
        began = time.monotonic()
        answer = await _answer(client, path, document)
        if answer == "200":
            got.good += 1
            got.seconds.append(time.monotonic() - began)
        else:
            got.failures[answer] += 1

    await _paced(ask, rate, until)


async def at_a_rate(client: httpx.AsyncClient, kind: str, body: Body, rate: float, until: float, got: Hostile) -> None:
    rng = random.Random(2)  # noqa: S311  (the same requests in every run)

    async def ask() -> None:
        path, document = body(rng)
        got.answers[kind, await _answer(client, path, document)] += 1

    await _paced(ask, rate, until)


async def in_bursts(
    client: httpx.AsyncClient, kind: str, body: Body, count: int, every: float, until: float, got: Hostile
) -> None:
    """One after another on one connection, as fast as they are answered."""
    rng = random.Random(3)  # noqa: S311  (the same requests in every run)
    async for _ in _ticks(every, until):
        for _ in range(count):
            path, document = body(rng)
            got.answers[kind, await _answer(client, path, document)] += 1


async def _paced(ask: Callable[[], Awaitable[None]], rate: float, until: float) -> None:
    """Starts one at each tick, whatever the others do; returns when all have been answered."""
    async with asyncio.TaskGroup() as group:
        async for _ in _ticks(1 / rate, until):
            group.create_task(_run(ask))


async def _run(ask: Callable[[], Awaitable[None]]) -> None:
    await ask()


async def _ticks(every: float, until: float) -> AsyncIterator[None]:
    at = time.monotonic()
    while at < until:
        yield
        at += every
        await asyncio.sleep(max(0.0, at - time.monotonic()))


async def _answer(client: httpx.AsyncClient, path: str, document: dict[str, Any]) -> str:
    """The status, or why there is none. A stream must end as one."""
    try:
        answer = await client.post(path, json=document, timeout=_SECONDS)
    except httpx.HTTPError as error:
        return type(error).__name__
    if answer.status_code == 200 and document.get("stream") and not answer.text.rstrip().endswith("data: [DONE]"):
        return "broken stream"
    return str(answer.status_code)
