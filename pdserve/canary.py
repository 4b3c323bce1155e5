"""One token through the proxy, or from one engine: the last thing before a deployment says that it is ready."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

import httpx

_RETRY_SECONDS = 0.2
_ASK_SECONDS = 3.0
_PROMPT = "pdserve canary"


@dataclass(frozen=True)
class Canary:
    """`said`: the last answer, for people."""

    ok: bool
    seconds: float
    said: str


async def one_token(url: str, model: str, *, seconds: float, key: str | None = None) -> Canary:
    """Asks for one token until it comes or the time is over. 503 and refused connections are tried again."""
    began = time.monotonic()
    said = "no answer"
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    body = {"model": model, "prompt": _PROMPT, "max_tokens": 1, "temperature": 0}
    async with httpx.AsyncClient(trust_env=False, headers=headers) as client:
        while (left := seconds - (time.monotonic() - began)) > 0:
            try:
                response = await client.post(f"{url}/v1/completions", json=body, timeout=left)
            except httpx.HTTPError as error:
                said, again = f"{type(error).__name__}: {error}", isinstance(error, httpx.ConnectError)
            else:
                said = f"{response.status_code} {response.text[:300]}"
                if response.status_code == 200 and response.json().get("choices"):
                    return Canary(True, time.monotonic() - began, "one token")
                again = response.status_code == 503
            if not again:
                break
            await asyncio.sleep(_RETRY_SECONDS)
    return Canary(False, time.monotonic() - began, said)


async def until_idle(proxy_url: str, worker: str) -> None:
    """Returns once the proxy has no request in flight on a worker, or cannot be asked. Bounded by the caller."""
    async with httpx.AsyncClient(trust_env=False) as client:
        while True:
            try:
                answer = (await client.get(f"{proxy_url}/workers", timeout=_ASK_SECONDS)).json()
                busy = [one["in_flight"] for one in answer["workers"] if one["name"] == worker]
            except (httpx.HTTPError, ValueError, KeyError, TypeError):
                return
            if not any(busy):
                return
            await asyncio.sleep(_RETRY_SECONDS)
