"""A decode engine that is killed while it streams: what its clients, those of the other decode, and those who wait are
told, and what is left of it on the engines."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import httpx

from pdserve.observe.metrics import engine_snapshot
from pdserve.system.process import send
from pdserve.system.procfs import ProcessId
from tests.launch.deployment import Deployment
from tests.real.kv_faults import held

STREAMS, STREAM_TOKENS = 4, 1200
"""Few and long: a client that has little of a busy machine must see them begin long before they end."""
LATE, LATE_TOKENS = 6, 8
LATE_PROMPT = 2000
NOTICED_SECONDS = 240


@dataclass
class Stream:
    """What one client of a streamed completion was sent; `events` are the data of its events."""

    prompt: list[int]
    max_tokens: int
    request_id: str
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
        """Ended as an answer does that is complete."""
        return self.events[-1] == "[DONE]" and not any("error" in chunk for chunk in self.chunks)


class Reached:
    """A deployment's proxy, which must log JSON, and its engines."""

    def __init__(self, deployment: Deployment, client: httpx.AsyncClient) -> None:
        self.deployment = deployment
        self.engines = {worker.name: worker.url for worker in deployment.run.read_plan().proxy.workers}
        self.endpoint = deployment.state().endpoint
        self._client = client
        self._key = {"Authorization": f"Bearer {deployment.run.read_key()}"}
        self._names = count()

    @property
    def prefills(self) -> list[str]:
        return [name for name in self.engines if name.startswith("prefill")]

    def request(self, prompt: list[int], max_tokens: int) -> Stream:
        """Not yet sent."""
        return Stream(prompt, max_tokens, f"lost-decode-{time.monotonic_ns()}-{next(self._names)}")

    async def stream(self, request: Stream) -> None:
        """To the end of its answer; raises httpx.RemoteProtocolError if that is cut off."""
        body = _body(request.prompt, request.max_tokens) | {"stream": True}
        headers = {"x-request-id": request.request_id}
        url = f"{self.endpoint}/v1/completions"
        async with self._client.stream("POST", url, json=body, headers=headers) as answer:
            assert answer.status_code == 200, await answer.aread()
            assert answer.headers["content-type"].startswith("text/event-stream")
            async for line in answer.aiter_lines():
                if line:
                    assert line.startswith("data: "), line
                    request.events.append(line.removeprefix("data: "))
                    request.began.set()
        request.ended = True

    async def ask(self, request: Stream) -> list[int]:
        """The same without a stream."""
        headers = {"x-request-id": request.request_id}
        return await self._tokens(f"{self.endpoint}/v1/completions", _body(request.prompt, request.max_tokens), headers)

    async def alone(self, request: Stream, tokens: int) -> list[int]:
        """So much of the answer of a prefill that is asked past the proxy, and so does everything itself."""
        url = f"{self.engines['prefill-0']}/v1/completions"
        return await self._tokens(url, _body(request.prompt, tokens), self._key)

    async def _tokens(self, url: str, body: dict[str, Any], headers: dict[str, str]) -> list[int]:
        answer = await self._client.post(url, json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        tokens: list[int] = answer.json()["choices"][0]["token_ids"]
        return tokens

    async def workers(self) -> dict[str, dict[str, Any]]:
        """What the proxy knows of them."""
        workers = (await self._client.get(f"{self.endpoint}/workers")).json()["workers"]
        return {worker["name"]: worker for worker in workers}

    async def sent_to_prefills(self) -> int:
        workers = await self.workers()
        return sum(workers[name]["served"] for name in self.prefills)

    async def lines(self, streams: list[Stream]) -> dict[str, dict[str, Any]]:
        """The proxy's lines about these requests, by id; they come soon after the end of the last."""
        wanted = {request.request_id for request in streams}
        log = self.deployment.run.path / self.deployment.run.read_plan().process("proxy").log
        deadline = time.monotonic() + NOTICED_SECONDS
        while True:
            lines = [json.loads(line) for line in log.read_text().splitlines() if line.startswith('{"request_id"')]
            by_id = {line["request_id"]: line for line in lines if line["request_id"] in wanted}
            if len(by_id) == len(wanted):
                return by_id
            assert time.monotonic() < deadline, wanted - by_id.keys()
            await self.workers()

    async def left(self, names: list[str]) -> dict[str, tuple[int, float]]:
        """Running requests and the share of blocks in use, where it is not nothing, each read after a tiny request of
        its own: an idle engine's gauges are old."""
        busy = {}
        for name in names:
            url = self.engines[name]
            await self._tokens(f"{url}/v1/completions", _body([11, 12, 13], 1), self._key)
            async with httpx.AsyncClient(headers=self._key, timeout=30, trust_env=False) as client:
                now = await engine_snapshot(url, client)
            if now.unfinished is None or now.kv_cache_usage is None:
                busy[name] = (1, 1.0)  # held up for more than a moment: nobody knows, so it is not free
            elif now.unfinished or now.kv_cache_usage:
                busy[name] = (now.unfinished, now.kv_cache_usage)
        return busy

    async def free(self, names: list[str], since: float, at_most: float) -> None:
        """Until nothing is left on these engines; fails so many seconds after `since` (time.monotonic)."""
        while left := await self.left(names):
            assert time.monotonic() - since < at_most, left

    async def back(self, name: str) -> None:
        """Until the supervisor has started a dead worker again and the proxy uses it."""
        await asyncio.to_thread(self.deployment.wait_for, "ready", after="degraded", name=name)
        deadline = time.monotonic() + NOTICED_SECONDS
        while (await self.workers())[name]["state"] != "ready":
            assert time.monotonic() < deadline, name


def _body(prompt: list[int], max_tokens: int) -> dict[str, Any]:
    return {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }


@asynccontextmanager
async def reached(deployment: Deployment) -> AsyncIterator[Reached]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=600, limits=limits, trust_env=False) as client:
        yield Reached(deployment, client)


@dataclass(frozen=True)
class Killed:
    """The clients of a killed decode, of the others, and those whose answer had not begun. `late` has the answers."""

    at: float
    """time.monotonic()"""
    answered: float
    """When every client had its end; no prefill computes for them any more."""
    lost: list[Stream]
    kept: list[Stream]
    late: list[tuple[Stream, list[int]]]
    late_lines: list[dict[str, Any]]
    """What the proxy logged of them."""


async def kill(
    asked: Reached, name: str, victim: ProcessId, sends: list[Stream], late: list[Stream], hold: Path
) -> Killed:
    """Kills `victim`, a process of the decode `name`, once every one of `sends` streams and the prefills have all of
    `late`, of which every other one is no stream. `hold`: a file that holds the prefills, so that none of `late` has
    begun then, however fast or slow this machine is."""
    async with asyncio.TaskGroup() as group:
        for request in sends:
            group.create_task(asked.stream(request))
        for request in sends:
            await request.began.wait()
        before = await asked.sent_to_prefills()
        with held(hold):
            waiting = [
                group.create_task(_late(asked, request, stream=index % 2 == 0)) for index, request in enumerate(late)
            ]
            deadline = time.monotonic() + NOTICED_SECONDS
            while await asked.sent_to_prefills() < before + len(late):
                assert time.monotonic() < deadline, "they are not sent"
            begun = [request for request in late if request.began.is_set()]
            still = [request for request in sends if not request.ended]
            at = time.monotonic()
            assert send(victim, signal.SIGKILL)
    answered = time.monotonic()
    assert len(still) == len(sends), "streams were over before the kill"
    assert not begun
    lines = await asked.lines(sends + late)
    lost = [request for request in sends if lines[request.request_id]["decode"] == name]
    answers = [(request, task.result()) for request, task in zip(late, waiting, strict=True)]
    kept = [request for request in sends if request not in lost]
    return Killed(at, answered, lost, kept, answers, [lines[request.request_id] for request in late])


async def assert_reported(asked: Reached, killed: Killed) -> None:
    """No answer is wrong, none is silently short, and whatever could be tried again was."""
    assert killed.lost
    assert killed.kept
    for request in killed.lost:
        error = request.chunks[-1]["error"]
        assert error.keys() >= {"message", "type", "param", "code"}, error
        assert not request.whole
        assert len(request.tokens) < request.max_tokens
    for request in killed.kept:
        assert request.whole, request.events[-2:]
    assert any(line["attempts"] > 1 for line in killed.late_lines), "none of them was on that decode"
    answers = [(request, request.tokens) for request in (*killed.lost, *killed.kept)] + killed.late
    right = await asyncio.gather(*(asked.alone(request, len(tokens)) for request, tokens in answers))
    assert [tokens for _, tokens in answers] == right
    assert {len(request.tokens) for request in killed.kept} == {STREAM_TOKENS}


async def _late(asked: Reached, request: Stream, *, stream: bool) -> list[int]:
    if not stream:
        return await asked.ask(request)
    await asked.stream(request)
    assert request.whole, request.events[-3:]
    return request.tokens
