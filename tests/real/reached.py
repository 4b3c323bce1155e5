"""A deployment as its clients reach it, and its engines as a router does: requests, streams, departures, figures."""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import httpx

from pdserve.observe.metrics import engine_snapshot
from pdserve.plan.model import Plan

PROXY = "proxy"
SECONDS = 300.0
"""For what must happen some time: a limit, not a measurement."""
_SEEDS = count(1)


def new_prompt(tokens: int) -> list[int]:
    """Return one that no engine has seen. The tiny model knows few tokens."""
    dice = random.Random(next(_SEEDS))
    return [dice.randrange(10, 250) for _ in range(tokens)]


def body(prompt: Sequence[int] | str, tokens: int = 8, **more: Any) -> dict[str, Any]:
    greedy = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
    return {"model": "tiny", "prompt": prompt, "max_tokens": tokens, **greedy, **more}


@dataclass
class Stream:
    """One streamed completion and what its client was sent; `events` are the data of its events."""

    prompt: list[int]
    max_tokens: int
    request_id: str = field(default_factory=lambda: f"stream-{next(_SEEDS)}-{time.monotonic_ns()}")
    events: list[str] = field(default_factory=list)
    began: asyncio.Event = field(default_factory=asyncio.Event)
    ended: bool = False

    @property
    def chunks(self) -> list[dict[str, Any]]:
        return [json.loads(event) for event in self.events if event != "[DONE]"]

    @property
    def tokens(self) -> list[int]:
        return [token for chunk in self.chunks for choice in chunk.get("choices", ()) for token in choice["token_ids"]]

    @property
    def whole(self) -> bool:
        """Whether it ended as an answer does that is complete."""
        return self.events[-1] == "[DONE]" and not any("error" in chunk for chunk in self.chunks)


class Reached:
    """A process is named as in the plan; "proxy" is the way of clients."""

    def __init__(self, plan: Plan, key: str, client: httpx.AsyncClient) -> None:
        workers = plan.proxy.workers
        self.engines = [worker.name for worker in workers]
        self.prefills = [worker.name for worker in workers if worker.role == "prefill"]
        self.urls = {worker.name: worker.url for worker in workers}
        self.urls[PROXY] = f"http://{plan.proxy.host}:{plan.proxy.port}"
        self._bootstraps = [worker.bootstrap_url for worker in workers if worker.bootstrap_url]
        self._lmcaches = [server.http_url for server in plan.lmcache]
        self._key = {"Authorization": f"Bearer {key}"}
        self._client = client

    # Requests

    async def ask(
        self,
        request: dict[str, Any],
        *,
        of: str = PROXY,
        path: str = "/v1/completions",
        request_id: str = "",
    ) -> httpx.Response:
        headers = self._headers(of, request_id)
        return await self._client.post(f"{self.urls[of]}{path}", json=request, headers=headers)

    async def tokens(
        self, prompt: Sequence[int] | str, tokens: int = 8, *, of: str = PROXY, request_id: str = "", **more: Any
    ) -> list[int]:
        """Return those of an answer, which must be one."""
        return tokens_of(await self.ask(body(prompt, tokens, **more), of=of, request_id=request_id))

    async def stream(self, stream: Stream, *, of: str = PROXY, **more: Any) -> None:
        """Read an answer to its end; raises httpx.RemoteProtocolError if it is cut off."""
        request = body(stream.prompt, stream.max_tokens, **more) | {"stream": True}
        headers = self._headers(of, stream.request_id)
        url = f"{self.urls[of]}/v1/completions"
        async with self._client.stream("POST", url, json=request, headers=headers) as answer:
            assert answer.status_code == 200, await answer.aread()
            assert answer.headers["content-type"].startswith("text/event-stream")
            async for line in answer.aiter_lines():
                if line:
                    assert line.startswith("data: "), line
                    stream.events.append(line.removeprefix("data: "))
                    stream.began.set()
        stream.ended = True

    async def leave(self, request: dict[str, Any], after: float, *, of: str = PROXY) -> None:
        """Close the connection after so many seconds, wherever the request is by then."""
        task = asyncio.ensure_future(self.ask(request, of=of))
        await asyncio.wait({task}, timeout=after)
        task.cancel()
        await asyncio.wait({task})

    def _headers(self, of: str, request_id: str) -> dict[str, str]:
        named = {"x-request-id": request_id} if request_id else {}
        return named if of == PROXY else named | self._key

    # The legs of a request over Mooncake, past the proxy

    async def prefill(self, transfer: str, prompt: Sequence[int], **more: Any) -> httpx.Response:
        params = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer}
        return await self.ask(body(prompt, 1, kv_transfer_params=params, **more), of="prefill-0")

    async def decode(self, transfer: str, prompt: Sequence[int], tokens: int = 8) -> httpx.Response:
        params = await self.pull(transfer)
        return await self.ask(body(prompt, tokens, kv_transfer_params=params), of="decode-0")

    async def pull(self, transfer: str) -> dict[str, Any]:
        """Return the parameters with which a decode gets what the only prefill has."""
        (bootstrap,) = self._bootstraps
        ranks = (await self._client.get(f"{bootstrap}/query")).json()
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "transfer_id": transfer,
            "remote_bootstrap_addr": bootstrap,
            "remote_engine_id": ranks["0"]["engine_id"],
        }

    # Figures

    async def page(self, of: str = PROXY) -> str:
        return (await self._client.get(f"{self.urls[of]}/metrics")).text

    async def figure(self, of: str, series: str) -> float:
        """Return the sum over a series, or over those of its labels that `series`, a regular expression, has."""
        page = await self.page(of)
        return sum(float(value) for value in re.findall(rf"^{series}(?:{{.*}})? (\S+)$", page, re.MULTILINE))

    async def prompt_tokens(self, of: str, source: str) -> float:
        """Return how many prompt tokens an engine had from one source: local_compute, local_cache_hit or
        external_kv_transfer."""
        return await self.figure(of, f'vllm:prompt_tokens_by_source_total{{.*source="{source}".*}}')

    async def computed(self) -> float:
        """Return how many requests the prefills have finished that were not aborted."""
        series = 'vllm:request_success_total{.*finished_reason="length".*}'
        return sum([await self.figure(name, series) for name in self.prefills])

    async def workers(self) -> dict[str, dict[str, Any]]:
        """Return what the proxy knows of the engines."""
        answer = await self._client.get(f"{self.urls[PROXY]}/workers")
        return {worker["name"]: worker for worker in answer.json()["workers"]}

    async def left(self, names: Iterable[str]) -> dict[str, tuple[int, float]]:
        """Running requests and the share of blocks in use, where it is not nothing, each read after a tiny request of
        its own: an idle engine's gauges are old. Held up for more than a moment: nobody knows, so it is not free."""
        busy = {}
        for name in names:
            await self.tokens([11, 12, 13], 1, of=name)
            async with httpx.AsyncClient(headers=self._key, timeout=30, trust_env=False) as client:
                now = await engine_snapshot(self.urls[name], client)
            if now.unfinished is None or now.kv_cache_usage is None:
                busy[name] = (1, 1.0)
            elif now.unfinished or now.kv_cache_usage:
                busy[name] = (now.unfinished, now.kv_cache_usage)
        return busy

    async def free(self, names: Iterable[str], seconds: float = SECONDS) -> float:
        """Wait until nothing is left on these engines; return the seconds that it took."""
        engines = list(names)

        async def nothing_left() -> bool:
            return not await self.left(engines)

        return await until(f"nothing is left on {engines}", nothing_left, seconds)

    # Caches

    async def forget(self, of: str) -> None:
        """Empty an engine's own cache; LMCache keeps what it has. Blocks that were fetched are free after the next
        step of the engine, which other requests bring."""
        url = f"{self.urls[of]}/reset_prefix_cache?reset_external=false"

        async def emptied() -> bool:
            await self.tokens([11, 12, 13], 1, of=of)
            return bool((await self._client.post(url)).json()["success"])

        await until(f"the cache of {of} is empty", emptied)

    async def l1(self) -> dict[str, int]:
        """Return what the only LMCache server says of its memory."""
        (lmcache,) = self._lmcaches
        manager: dict[str, int] = (await self._client.get(f"{lmcache}/status")).json()["storage_manager"]["l1_manager"]
        return manager

    async def stored(self) -> int:
        """Return how many chunks can be loaded; one that is still being written cannot."""
        l1 = await self.l1()
        return l1["total_object_count"] - l1["staging_object_count"]

    async def unlocked(self) -> bool:
        return (await self.l1())["read_locked_count"] == 0


@asynccontextmanager
async def reach(plan: Plan, key: str) -> AsyncIterator[Reached]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=600, limits=limits, trust_env=False) as client:
        yield Reached(plan, key, client)
    await asyncio.sleep(0)  # a connection that was closed is gone after the loop's next round


def tokens_of(answer: httpx.Response) -> list[int]:
    assert answer.status_code == 200, answer.text
    tokens: list[int] = answer.json()["choices"][0]["token_ids"]
    return tokens


async def until(what: str, look: Callable[[], Awaitable[object]], seconds: float = SECONDS) -> float:
    """Wait until `look` is true; return the seconds that it took. AssertionError with `what` after so many."""
    began = time.monotonic()
    while not await look():
        assert time.monotonic() - began < seconds, f"not within {seconds:g} s: {what}"
        await asyncio.sleep(0.02)
    return time.monotonic() - began
