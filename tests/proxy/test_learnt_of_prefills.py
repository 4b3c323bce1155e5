"""The engine ids that the proxy learns of a prefill: never those of another life, or of another of its name."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from pdserve.pd.config.proxy import WorkerConfig
from pdserve.pd.processes import shared_numbers
from pdserve.pd.protocols.engine_ids import EngineIds
from pdserve.pd.protocols.mooncake import MooncakeProtocol
from pdserve.pd.workers.engines import Engines
from pdserve.pd.workers.load import LoadBoard
from pdserve.pd.workers.registry import Registry, Worker
from tests.proxy.deployment import proxy_config


class Prefill:
    """Answers every request with its name as its engine id, `before` which it waits."""

    def __init__(self, name: str, before: asyncio.Event | None) -> None:
        self.name, self._before = name, before
        self._questions = asyncio.Semaphore(0)
        self.url = ""

    async def is_asked(self) -> None:
        """Once more than this was called before."""
        await self._questions.acquire()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        self._questions.release()
        if self._before is not None:
            await self._before.wait()
        data = json.dumps({"0": {"engine_id": self.name}}).encode()
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        writer.write(head % len(data) + data)
        with suppress(ConnectionError):
            await writer.drain()
            writer.close()


@asynccontextmanager
async def prefill(name: str, before: asyncio.Event | None = None) -> AsyncIterator[Prefill]:
    it = Prefill(name, before)
    server = await asyncio.start_server(it.serve, "127.0.0.1", 0)
    it.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield it
    finally:
        server.close()


def config(at: Prefill) -> WorkerConfig:
    return WorkerConfig(name="prefill-0", role="prefill", url=at.url, bootstrap_url=at.url)


def registry_of(*workers: WorkerConfig) -> Registry:
    config = proxy_config(protocol="mooncake", workers=[worker.model_dump() for worker in workers])
    return Registry(config, LoadBoard(shared_numbers.private(LoadBoard.cells(2))))


def ready(registry: Registry) -> Worker:
    registry.set_state("prefill-0", "ready")
    return registry.workers["prefill-0"]


def engine_id_of(known: EngineIds, worker: Worker) -> str | None:
    transfer = known.next(worker)
    return None if transfer is None else transfer.engine_id


def test_what_is_learnt_of_a_life_that_has_ended_is_void() -> None:
    async def ask() -> None:
        before = asyncio.Event()
        async with prefill("one", before) as one:
            registry, known = registry_of(config(one)), EngineIds()
            worker = ready(registry)
            old = asyncio.ensure_future(known.learn(worker))
            await one.is_asked()
            registry.set_state("prefill-0", "dead")
            ready(registry)
            before.set()
            await old
            assert engine_id_of(known, worker) is None
            await known.learn(worker)
            assert engine_id_of(known, worker) == "one"

    asyncio.run(ask())


def test_another_worker_of_the_same_name_is_another_one() -> None:
    """An admin removes it and adds one elsewhere, which is at the same life: what was learnt would be the old one's,
    and so would be what is asked."""

    async def replaced() -> None:
        async with prefill("first") as first, prefill("second") as second:
            registry, learnt = registry_of(config(first)), EngineIds()
            old = ready(registry)
            await learnt.learn(old)
            assert engine_id_of(learnt, old) == "first"
            registry.remove("prefill-0")
            registry.add(config(second))
            new = ready(registry)
            assert new.life == old.life
            assert engine_id_of(learnt, new) is None
            await learnt.learn(new)
            assert engine_id_of(learnt, new) == "second"

    asyncio.run(replaced())


def test_a_worker_that_is_gone_is_forgotten() -> None:
    """Names are an autoscaler's: there may be any number of them."""

    async def gone() -> None:
        async with prefill("one") as one:
            registry = registry_of(config(one))
            split = MooncakeProtocol(registry, Engines(None), "tiny")
            ready(registry)
            await split.background.drained()
            learnt = split._engine_ids
            assert len(learnt._known) == 1
            registry.remove("prefill-0")
            assert (learnt._known, learnt._turns) == ({}, {})

    asyncio.run(gone())
