"""Following engines over ZMQ: vLLM's own publisher and engine where it is installed, and one that loses batches."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Self

import httpx
import msgspec
import pytest
import zmq
import zmq.asyncio

from pdserve.pd.config.proxy import WorkerConfig
from pdserve.pd.routing.ask import RoutingRequest
from pdserve.pd.routing.build import kv_events_of
from pdserve.pd.routing.kv_index import KvIndex
from pdserve.pd.routing.kv_sources import Source, sources_from
from pdserve.pd.routing.kv_subscriber import KvSubscriber
from pdserve.pd.workers.engines import Engines
from pdserve.pd.workers.kv_feeds import KvFeeds
from pdserve.pd.workers.pools import Pools
from pdserve.pd.workers.registry import Registry
from tests.launch.deployment import free_ports
from tests.proxy.deployment import Child, registry_of
from tests.proxy.raw import listening, whole


def block(number: int) -> list[object]:
    """One block of the prompt [0, 1, 2, ...], two tokens long, that follows the one before."""
    name, parent = b"%d" % number, b"%d" % (number - 1)
    return ["BlockStored", [name], parent if number else None, [2 * number, 2 * number + 1], 2, None, "GPU", None]


def held(index: KvIndex, worker: str = "w", rank: int = 0) -> int:
    return index.matched(worker, RoutingRequest(prompt=b"", tokens=list(range(100)), estimate=100)).get(rank, 0)


async def until(met: Callable[[], bool]) -> None:
    while not met():
        await asyncio.sleep(0.005)


class Publisher:
    """Like vLLM's, but it can lose batches, forget old ones, and begin anew."""

    def __init__(self, folder: Path, *, replay: bool, old_frames: bool = False) -> None:
        self._context = zmq.asyncio.Context()
        self._delimiters = [b""] if old_frames else [b"", b"kv-events"]
        self.source = Source(0, f"ipc://{folder}/events", f"ipc://{folder}/replay" if replay else None, "kv-events")
        self.sent: list[bytes] = []
        self.first_kept = 0
        self.asked: list[int] = []
        self._bind()
        self._replay: asyncio.Task[None] | None = asyncio.create_task(self._answer()) if replay else None

    def _bind(self) -> None:
        self.socket = self._context.socket(zmq.XPUB)
        self.socket.bind(self.source.endpoint)

    async def send(self, *events: list[object], lost: bool = False, rank: int | None = 0) -> None:
        number = len(self.sent)
        self.sent.append(msgspec.msgpack.encode([1.0, events, rank]))
        if not lost:
            await self.socket.send_multipart([b"kv-events", number.to_bytes(8), self.sent[-1]])

    async def begin_anew(self) -> None:
        """As after a restart of the engine on the same port."""
        self.socket.close(0)
        self.sent.clear()
        self._bind()
        await self.socket.recv()

    async def _answer(self) -> None:
        with self._context.socket(zmq.ROUTER) as router:
            router.bind(self.source.replay_endpoint or "")
            while True:
                peer, _, start = await router.recv_multipart()
                self.asked.append(int.from_bytes(start))
                for number, payload in list(enumerate(self.sent))[max(self.first_kept, int.from_bytes(start)) :]:
                    await router.send_multipart([peer, *self._delimiters, number.to_bytes(8), payload])
                await router.send_multipart([peer, *self._delimiters, (-1).to_bytes(8, signed=True), b""])

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._replay is not None:
            self._replay.cancel()
            await asyncio.gather(self._replay, return_exceptions=True)
        self._context.destroy(linger=0)


@dataclass
class Followed:
    """A publisher that is followed, and what is known of it."""

    publisher: Publisher
    index: KvIndex
    subscriber: KvSubscriber

    async def tells(self, *events: list[object], holds: int) -> None:
        """Send a batch, and wait until so many tokens are known to be held."""
        await self.publisher.send(*events)
        await until(lambda: held(self.index) == holds)


@asynccontextmanager
async def following(publisher: Publisher) -> AsyncIterator[Followed]:
    index = KvIndex(1000)
    subscriber = KvSubscriber(index, replay_timeout_seconds=60)
    subscriber.start("w", [publisher.source])
    async with publisher:
        try:
            await publisher.socket.recv()
            yield Followed(publisher, index, subscriber)
        finally:
            await subscriber.close()


@pytest.mark.parametrize("old_frames", [False, True])
async def test_what_was_before_is_asked_for(tmp_path: Path, old_frames: bool) -> None:
    """Replay answers had no topic before vLLM 0.27."""
    publisher = Publisher(tmp_path, replay=True, old_frames=old_frames)
    await publisher.send(block(0), block(1), lost=True)
    async with following(publisher) as engine:
        await until(lambda: held(engine.index) == 4)
        await engine.tells(block(2), holds=6)
        assert publisher.asked == [0]


async def test_what_was_lost_is_asked_for(tmp_path: Path) -> None:
    publisher = Publisher(tmp_path, replay=True)
    async with following(publisher) as engine:
        await engine.tells(block(0), holds=2)
        await publisher.send(block(1), lost=True)
        await publisher.send(block(2), lost=True)
        await engine.tells(block(3), holds=8)
        assert publisher.asked == [0, 1]
        assert engine.subscriber.counts["applied"] == 4, "each once"


@pytest.mark.parametrize("replay", [True, False])
async def test_what_cannot_be_asked_for_makes_the_rest_doubtful(tmp_path: Path, replay: bool) -> None:
    """A removal may have been in it: what was known is forgotten."""
    publisher = Publisher(tmp_path, replay=replay)
    async with following(publisher) as engine:
        await engine.tells(block(0), block(1), holds=4)
        await publisher.send(["BlockRemoved", [b"1"], "GPU"], lost=True)
        publisher.first_kept = 2
        await engine.tells(block(0), holds=2)
        await engine.tells(block(1), holds=4)
        assert engine.subscriber.counts["gaps"] == 1


@pytest.mark.parametrize("replay", [True, False])
async def test_an_engine_that_began_anew_has_an_empty_cache(tmp_path: Path, replay: bool) -> None:
    publisher = Publisher(tmp_path, replay=replay)
    async with following(publisher) as engine:
        for number in range(3):
            await engine.tells(block(number), holds=2 * number + 2)
        await publisher.begin_anew()
        await engine.tells(block(0), holds=2)
        assert engine.subscriber.counts["restarts"] == 1


async def test_what_cannot_be_read_makes_the_rest_doubtful(tmp_path: Path) -> None:
    publisher = Publisher(tmp_path, replay=False)
    async with following(publisher) as engine:
        for no_batch in ([b"kv-events"], [b"kv-events", b"no number", b"payload"]):
            await publisher.socket.send_multipart(no_batch)
        await engine.tells(block(0), block(1), holds=4)
        await publisher.send("nonsense")  # type: ignore[arg-type]
        await engine.tells(block(0), holds=2)
        assert engine.subscriber.counts["bad"] == 3


async def test_the_rank_is_the_one_that_the_engine_says(tmp_path: Path) -> None:
    publisher = Publisher(tmp_path, replay=False)
    async with following(publisher) as engine:
        await publisher.send(block(0), rank=5)
        await publisher.send(block(1), rank=None)
        await until(lambda: held(engine.index, rank=5) == 4)


async def test_an_impossible_endpoint_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    subscriber = KvSubscriber(KvIndex(10), replay_timeout_seconds=1)
    subscriber.start("w", [Source(0, "tcp://not an address")])
    await until(lambda: "cannot follow" in caplog.text)
    await subscriber.close()


async def test_a_replay_endpoint_that_is_silent_does_not_stop_the_events(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    index = KvIndex(1000)
    subscriber = KvSubscriber(index, replay_timeout_seconds=0.05)
    async with Publisher(tmp_path, replay=False) as publisher:
        subscriber.start("w", [Source(0, publisher.source.endpoint, f"ipc://{tmp_path}/nobody", "kv-events")])
        await publisher.socket.recv()
        await publisher.send(block(0))
        await until(lambda: held(index) == 2)
        assert "does not answer" in caplog.text
        await subscriber.close()


# --- whose KV events are followed: those of workers that are there, and of no other


def followed() -> set[str]:
    """Tasks that follow a worker."""
    return {task.get_name() for task in asyncio.all_tasks() if task.get_name().startswith("kv events of")}


@asynccontextmanager
async def deployment(decode: WorkerConfig) -> AsyncIterator[tuple[Registry, KvIndex]]:
    registry = registry_of("nixl", decode, routing={"decode": {"kind": "kv_events"}})
    pools = Pools(registry._config, registry)
    feeds = KvFeeds(registry, pools, Engines(None))
    policy = kv_events_of(pools.policies["decode"])
    assert policy is not None
    registry.set_state("decode-0", "ready")
    try:
        yield registry, policy.index
    finally:
        await feeds.close()
        registry.close()


def decode_of(publisher: Publisher) -> WorkerConfig:
    return WorkerConfig(
        name="decode-0", role="decode", url="http://127.0.0.1:1", kv_events_url=publisher.source.endpoint
    )


async def test_a_lost_worker_is_not_followed(tmp_path: Path) -> None:
    async with Publisher(tmp_path, replay=False) as publisher, deployment(decode_of(publisher)) as (registry, index):
        await publisher.socket.recv()
        await publisher.send(block(0))
        await until(lambda: index.blocks("decode-0") == 1)
        registry.set_state("decode-0", "dead")
        await until(lambda: not followed())
        assert await publisher.socket.recv() == b"\0", "unsubscribed"
        await publisher.send(block(1))
        assert index.blocks("decode-0") == 0


async def test_a_worker_that_comes_back_at_once_is_followed(tmp_path: Path) -> None:
    """Its removal and its return reach the feeds in one turn of the loop."""
    async with Publisher(tmp_path, replay=False) as publisher, deployment(decode_of(publisher)) as (registry, index):
        await publisher.socket.recv()
        registry.remove("decode-0")
        registry.add(decode_of(publisher))
        registry.set_state("decode-0", "ready")
        # The publisher does not say which of the two it has lost: it is asked until the new one hears it.
        while not index.blocks("decode-0"):
            await publisher.send(block(0))
            await asyncio.sleep(0)
        assert followed()


async def test_a_worker_lost_while_it_is_asked_is_not_followed(tmp_path: Path) -> None:
    asked, told = asyncio.Event(), asyncio.Event()
    body = json.dumps({"0": {"endpoint": f"ipc://{tmp_path}/events"}}).encode()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        asked.set()
        await told.wait()
        writer.write(whole(body))

    async with listening(answer) as url:
        before = asyncio.all_tasks()
        async with deployment(WorkerConfig(name="decode-0", role="decode", url=url)) as (registry, _):
            await asked.wait()
            following = asyncio.all_tasks() - before
            registry.set_state("decode-0", "dead")
            told.set()
            await asyncio.wait(following)
            assert not followed()


# --- what the index says that an engine holds is what a real engine says that it had cached


TINY = Path(__file__).parents[2] / ".cache" / "tiny-model"
BLOCK = 32  # tokens: the least that vLLM has on a CPU
BLOCKS = 200  # few enough for evictions in most requests


@pytest.fixture
def engine() -> Iterator[str]:
    """One vLLM that publishes its KV events. Gives its URL."""
    port, events, replay = free_ports(3)
    config = {
        "enable_kv_cache_events": True,
        "endpoint": f"tcp://*:{events}",
        "replay_endpoint": f"tcp://*:{replay}",
    }
    options = {
        "model": TINY,
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
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "VLLM_SERVER_DEV_MODE": "1",  # for /reset_prefix_cache
    }
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--disable-uvicorn-access-log"]
    command += ["--enforce-eager", "--enable-prompt-tokens-details"]
    command += [f"--{name}={value}" for name, value in options.items()]
    process = Child(command, environment, fresh=True)
    try:
        process.until("Application startup complete")
        yield f"http://127.0.0.1:{port}"
    finally:
        process.end(signal.SIGTERM)


@pytest.mark.real
async def test_it_knows_exactly_what_a_real_engine_has_cached(engine: str) -> None:
    """Conversations with evictions, salted requests, a reset of the cache, and a burst of parallel requests."""
    random = Random(5)
    index = KvIndex(10_000)
    subscriber = KvSubscriber(index, replay_timeout_seconds=60)

    def new(count: int) -> list[int]:
        return [random.randrange(10, 500) for _ in range(count)]

    def expected(tokens: list[int]) -> int:
        """An engine always computes at least the last token itself."""
        known = index.matched("engine", RoutingRequest(prompt=b"", tokens=tokens)).get(0, 0)
        return min(known, (len(tokens) - 1) // BLOCK * BLOCK)

    async with httpx.AsyncClient(base_url=engine, timeout=120) as client:

        async def complete(tokens: list[int], made: int = 20, **more: Any) -> tuple[int, list[int]]:
            """Return how many tokens of the prompt were cached, and those that were made."""
            body = {"model": "tiny", "prompt": tokens, "max_tokens": made, "ignore_eos": True, "return_token_ids": True}
            answer = await client.post("/v1/completions", json={**body, **more})
            assert answer.is_success, answer.text
            whole = answer.json()
            details = whole["usage"]["prompt_tokens_details"] or {}
            return details.get("cached_tokens") or 0, whole["choices"][0]["token_ids"]

        async def settled() -> None:
            """All events of earlier requests are in: those of a later one are, a prompt that nobody has seen."""
            await complete(later := new(BLOCK + 1), 1)
            await until(lambda: expected(later) == BLOCK)

        await complete(early := new(300))
        subscriber.start("engine", sources_from((await client.get("/kv_event_sources")).json(), "127.0.0.1"))
        await until(lambda: expected(early) == 288)  # by the replay
        conversations: list[list[int]] = []
        hits = 0
        for step in range(150):
            if not conversations or random.random() < 0.3:
                conversations.append(new(random.randrange(20, 400)))
            number = random.randrange(len(conversations))
            tokens = conversations[number]
            salt: dict[str, Any] = {"cache_salt": "salt"} if random.random() < 0.1 else {}
            await settled()
            known = expected(tokens)
            cached, made = await complete(tokens, **salt)
            if not salt:
                assert cached == known, f"step {step}, {len(tokens)} tokens"
                hits += cached > 0
            if len(tokens) < 1500:
                conversations[number] = tokens + made + new(random.randrange(5, 120))
            if step == 75:
                assert (await client.post("/reset_prefix_cache")).is_success
        await asyncio.gather(*(complete(random.choice(conversations)) for _ in range(30)))
        for tokens in random.sample(conversations, 10):
            await settled()
            known = expected(tokens)
            assert (await complete(tokens))[0] == known
    assert hits > 20
    assert index.counts["removed"] > BLOCKS, "there were evictions"
    assert index.counts["unnamed"] > 0, "there were salted blocks"
    assert index.counts["clears"] == 1
    assert subscriber.counts["bad"] == subscriber.counts["gaps"] == 0
    await subscriber.close()
