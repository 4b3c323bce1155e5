"""Whose KV events are followed: those of workers that are there, and of no other."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from pdserve.pd.config.proxy import ProxyConfig, WorkerConfig
from pdserve.pd.processes import shared_numbers
from pdserve.pd.routing.build import kv_events_of
from pdserve.pd.routing.kv_index import KvIndex
from pdserve.pd.workers.engines import Engines
from pdserve.pd.workers.kv_feeds import KvFeeds
from pdserve.pd.workers.load import LoadBoard
from pdserve.pd.workers.pools import Pools
from pdserve.pd.workers.registry import Registry
from tests.proxy.test_kv_events_subscriber import Publisher, batch, block, run, until


def followed() -> set[str]:
    """Tasks that follow a worker."""
    return {task.get_name() for task in asyncio.all_tasks() if task.get_name().startswith("kv events of")}


@asynccontextmanager
async def deployment(decode: WorkerConfig) -> AsyncIterator[tuple[Registry, KvIndex]]:
    config = ProxyConfig.model_validate(
        {
            "port": 0,
            "served_name": "tiny",
            "protocol": "nixl",
            "workers": [decode.model_dump()],
            "routing": {"decode": {"kind": "kv_events"}},
        }
    )
    registry = Registry(config, LoadBoard(shared_numbers.private(LoadBoard.cells(1))))
    pools = Pools(config, registry)
    feeds = KvFeeds(registry, pools, Engines(None))
    policy = kv_events_of(pools.policies["decode"])
    assert policy is not None
    try:
        yield registry, policy.index
    finally:
        await feeds.close()
        registry.close()


@asynccontextmanager
async def published(folder: Path) -> AsyncIterator[Publisher]:
    publisher = Publisher(folder, replay=False)
    try:
        yield publisher
    finally:
        await publisher.close()


def decode_of(publisher: Publisher) -> WorkerConfig:
    return WorkerConfig(
        name="decode-0", role="decode", url="http://127.0.0.1:1", kv_events_url=publisher.source.endpoint
    )


@pytest.mark.parametrize("how", ["removed", "dead"])
def test_a_worker_that_is_lost_is_not_followed_though_its_engine_publishes_on(tmp_path: Path, how: str) -> None:
    async def test() -> None:
        async with published(tmp_path) as publisher, deployment(decode_of(publisher)) as (registry, index):
            registry.set_state("decode-0", "ready")
            await publisher.heard()
            await publisher.send(batch(block(0)))
            await until(lambda: index.blocks("decode-0") == 1)
            if how == "removed":
                registry.remove("decode-0")
            else:
                registry.set_state("decode-0", "dead")
            await until(lambda: not followed())
            assert await publisher._socket.recv() == b"\0", "unsubscribed"
            await publisher.send(batch(block(1)))
            assert index.blocks("decode-0") == 0

    run(test)


def test_a_worker_that_comes_back_at_once_is_followed(tmp_path: Path) -> None:
    """Its removal and its return reach the feeds in one turn of the loop."""

    async def test() -> None:
        async with published(tmp_path) as publisher, deployment(decode_of(publisher)) as (registry, index):
            registry.set_state("decode-0", "ready")
            await publisher.heard()
            registry.remove("decode-0")
            registry.add(decode_of(publisher))
            registry.set_state("decode-0", "ready")
            # The publisher does not say which of the two it has lost: it is asked until the new one hears it.
            while not index.blocks("decode-0"):
                await publisher.send(batch(block(0)))
                await asyncio.sleep(0)
            assert followed()

    run(test)


def test_a_worker_that_is_lost_while_it_says_where_it_publishes_is_not_followed(tmp_path: Path) -> None:
    async def test() -> None:
        asked, told = asyncio.Event(), asyncio.Event()
        body = json.dumps({"0": {"endpoint": f"ipc://{tmp_path}/events"}}).encode()

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            asked.set()
            await told.wait()
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with server, deployment(WorkerConfig(name="decode-0", role="decode", url=url)) as (registry, _):
            before = asyncio.all_tasks()
            registry.set_state("decode-0", "ready")
            await asked.wait()
            following = asyncio.all_tasks() - before
            registry.set_state("decode-0", "dead")
            told.set()
            await asyncio.wait(following)
            assert not followed()

    run(test)
