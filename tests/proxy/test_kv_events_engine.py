"""The index against a real engine: what it says an engine holds is what the engine says it had cached."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest

from pdserve.pd.routing.ask import RoutingRequest
from pdserve.pd.routing.kv_index import KvIndex
from pdserve.pd.routing.kv_sources import sources_from
from pdserve.pd.routing.kv_subscriber import KvSubscriber
from tests.launch.deployment import free_ports

pytestmark = pytest.mark.real

MODEL = Path(__file__).parents[2] / ".cache" / "tiny-model"
BLOCK = 32  # tokens: the least that vLLM has on a CPU
BLOCKS = 200  # few enough for evictions in most requests
START_SECONDS = 800


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """One vLLM that publishes its KV events. Gives its URL."""
    folder = tmp_path_factory.mktemp("engine")
    port, events, replay = free_ports(3)
    config = {
        "enable_kv_cache_events": True,
        "endpoint": f"tcp://*:{events}",
        "replay_endpoint": f"tcp://*:{replay}",
    }
    options = {
        "model": MODEL,
        "served-model-name": "tiny",
        "host": "127.0.0.1",
        "port": port,
        "dtype": "float32",
        "max-model-len": 2048,
        "max-num-seqs": 8,
        "block-size": BLOCK,
        "num-gpu-blocks-override": BLOCKS,
        "kv-events-config": json.dumps(config),
    }
    environment = {
        **os.environ,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "VLLM_SERVER_DEV_MODE": "1",  # for /reset_prefix_cache
    }
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--enforce-eager", "--enable-prompt-tokens-details"]
    command += [f"--{name}={value}" for name, value in options.items()]
    log = folder / "engine.log"
    with log.open("w") as output, subprocess.Popen(command, env=environment, stdout=output, stderr=output) as process:
        try:
            url = f"http://127.0.0.1:{port}"
            asyncio.run(until_ready(url, process, log))
            yield url
        finally:
            process.terminate()


async def until_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    async with asyncio.timeout(START_SECONDS), httpx.AsyncClient(base_url=url) as client:
        while True:
            assert process.poll() is None, log.read_text()[-4000:]
            try:
                if (await client.get("/health")).is_success:
                    return
            except httpx.TransportError:
                await asyncio.sleep(0.5)


class Talk:
    """Requests by token ids, and the index that follows the engine."""

    def __init__(self, client: httpx.AsyncClient, index: KvIndex, subscriber: KvSubscriber) -> None:
        self.client = client
        self.index = index
        self.subscriber = subscriber

    async def complete(self, tokens: list[int], made: int = 20, **more: Any) -> tuple[int, list[int]]:
        """Return how many tokens of the prompt were cached, and those that were made."""
        body = {"model": "tiny", "prompt": tokens, "max_tokens": made, "ignore_eos": True, "return_token_ids": True}
        answer = await self.client.post("/v1/completions", json={**body, **more})
        assert answer.is_success, answer.text
        whole = answer.json()
        details = whole["usage"]["prompt_tokens_details"] or {}
        return details.get("cached_tokens") or 0, whole["choices"][0]["token_ids"]

    async def settled(self, new: list[int]) -> None:
        """All events of earlier requests are in: those of a later one are, a prompt that the engine has not seen."""
        await self.complete(new, 1)
        while self.expected(new) != BLOCK:
            await asyncio.sleep(0.002)

    def expected(self, tokens: list[int]) -> int:
        """An engine always computes at least the last token itself."""
        held = self.index.matched("engine", RoutingRequest(prompt=b"", tokens=tokens)).get(0, 0)
        return min(held, (len(tokens) - 1) // BLOCK * BLOCK)


def test_it_knows_exactly_what_a_real_engine_has_cached(engine: str) -> None:
    """Conversations with evictions, salted requests, a reset of the cache, and a burst of parallel requests."""

    async def test() -> None:
        random = Random(5)

        def new(count: int) -> list[int]:
            return [random.randrange(10, 500) for _ in range(count)]

        index = KvIndex(10_000)
        subscriber = KvSubscriber(index, replay_timeout_seconds=60)
        async with httpx.AsyncClient(base_url=engine, timeout=120) as client:
            talk = Talk(client, index, subscriber)
            early = new(300)
            await talk.complete(early)
            sources = sources_from((await client.get("/kv_event_sources")).json(), "127.0.0.1")
            subscriber.start("engine", sources)
            while talk.expected(early) != 288:  # by the replay
                await asyncio.sleep(0.01)
            conversations: list[list[int]] = []
            hits = 0
            for step in range(150):
                if not conversations or random.random() < 0.3:
                    conversations.append(new(random.randrange(20, 400)))
                number = random.randrange(len(conversations))
                tokens = conversations[number]
                salt: dict[str, Any] = {"cache_salt": "salt"} if random.random() < 0.1 else {}
                await talk.settled(new(BLOCK + 1))
                expected = talk.expected(tokens)
                cached, made = await talk.complete(tokens, **salt)
                if not salt:
                    assert cached == expected, f"step {step}, {len(tokens)} tokens"
                    hits += cached > 0
                if len(tokens) < 1500:
                    conversations[number] = tokens + made + new(random.randrange(5, 120))
                if step == 75:
                    assert (await client.post("/reset_prefix_cache")).is_success
            await asyncio.gather(*(talk.complete(random.choice(conversations)) for _ in range(30)))
            for tokens in random.sample(conversations, 10):
                await talk.settled(new(BLOCK + 1))
                expected = talk.expected(tokens)
                assert (await talk.complete(tokens))[0] == expected
            assert hits > 20
            assert index.counts["removed"] > BLOCKS, "there were evictions"
            assert index.counts["unnamed"] > 0, "there were salted blocks"
            assert index.counts["clears"] == 1
            assert subscriber.counts["bad"] == subscriber.counts["gaps"] == 0
        await subscriber.close()

    asyncio.run(test())
