"""Streamed requests, and requests whose client leaves."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

import httpx

from pdserve.errors import VerifyError
from pdserve.time_limit import time_limit
from pdserve.verify.target import Target, describe

_DONE = "[DONE]"


async def read_stream(target: Target, prompt: tuple[int, ...], leg: str, tokens: int) -> int:
    """Reads a stream to its end and returns its number of chunks."""
    chunks = [chunk async for chunk in _stream(target, prompt, leg, tokens)]
    if len(chunks) < 2 or chunks[-1] != _DONE:
        raise VerifyError(f"a stream of {len(chunks)} chunks ended without {_DONE}", where=target.proxy_url)
    return len(chunks) - 1


async def cancel_after_first_chunk(target: Target, prompt: tuple[int, ...], leg: str, tokens: int) -> bool:
    """False: the answer was over already."""
    async with aclosing(_stream(target, prompt, leg, tokens)) as chunks:
        async for chunk in chunks:
            return chunk != _DONE
    return False


async def cancel_before_first_byte(
    target: Target, prompt: tuple[int, ...], leg: str, tokens: int, *, after: float
) -> bool:
    """Not streamed: no byte comes before the whole answer. Leaves `after` so many seconds. False: the engine was
    faster."""
    body = target.body(prompt, salt=target.salt(leg), max_tokens=tokens)
    try:
        async with time_limit(after):
            response = await target.client.post(
                f"{target.proxy_url}/v1/completions",
                json=body,
                headers=target.headers(target.proxy_url),
                timeout=target.plan.canary_seconds,
            )
    except TimeoutError:
        return True
    except httpx.HTTPError as error:
        raise VerifyError(
            f"a request failed before it was cancelled: {describe(error)}", where=target.proxy_url
        ) from error
    if response.status_code != 200:
        raise VerifyError(
            f"a request was answered {response.status_code} before it was cancelled: {response.text[:300]}",
            where=target.proxy_url,
        )
    return False


async def _stream(target: Target, prompt: tuple[int, ...], leg: str, tokens: int) -> AsyncGenerator[str, None]:
    """The data of each server-sent event. Raises VerifyError for an error, also for one in the middle."""
    body = target.body(prompt, salt=target.salt(leg), max_tokens=tokens, stream=True)
    url, seconds = f"{target.proxy_url}/v1/completions", target.plan.canary_seconds
    try:
        async with (
            time_limit(seconds),
            target.client.stream(
                "POST", url, json=body, headers=target.headers(target.proxy_url), timeout=seconds
            ) as response,
        ):
            if response.status_code != 200:
                text = (await response.aread()).decode(errors="replace")
                raise VerifyError(f"a stream was answered {response.status_code}: {text[:300]}", where=url)
            async for line in response.aiter_lines():
                if line.startswith('data: {"error"'):
                    raise VerifyError(f"a stream ended with an error: {line[:300]}", where=url)
                if line.startswith("data: "):
                    yield line.removeprefix("data: ")
    except TimeoutError as error:
        raise VerifyError(f"a stream did not end within {seconds:g} s", where=url) from error
    except httpx.HTTPError as error:
        raise VerifyError(f"a stream broke off: {describe(error)}", where=url) from error
