"""What the proxy learns of a prefill: asked once however many want to know, and never that of another of its name."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from pdserve.pd.config.proxy import WorkerConfig
from pdserve.pd.processes import shared_numbers
from pdserve.pd.protocols.engine_ids import EngineIds
from pdserve.pd.protocols.mooncake import MooncakeProtocol
from pdserve.pd.protocols.nixl_push import NixlPushProtocol
from pdserve.pd.protocols.push_addresses import PushAddresses
from pdserve.pd.workers.engines import Engines
from pdserve.pd.workers.failure import WorkerFailedError
from pdserve.pd.workers.load import LoadBoard
from pdserve.pd.workers.registry import Registry, Worker
from tests.proxy.deployment import proxy_config


class Prefill:
    """Answers every request with its name as its engine id, `before` which it waits."""

    def __init__(self, name: str, before: asyncio.Event | None) -> None:
        self.name, self._before = name, before
        self._questions = asyncio.Semaphore(0)
        self.asked = 0
        self.status = b"200 OK"
        self.url = ""

    async def is_asked(self) -> None:
        """Once more than this was called before."""
        await self._questions.acquire()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        self.asked += 1
        self._questions.release()
        if self._before is not None:
            await self._before.wait()
        address = {"remote_engine_id": self.name, "remote_host": "h", "remote_port": 1, "tp_size": 1}
        if head.startswith(b"GET"):
            answer: dict[str, Any] = {"0": {"engine_id": self.name}}
        else:
            answer = {"choices": [{"finish_reason": "length"}], "kv_transfer_params": address}
        data = json.dumps(answer).encode()
        line = b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        writer.write(line % (self.status, len(data)) + data)
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
    config = proxy_config(protocol="nixl-push", workers=[worker.model_dump() for worker in workers])
    return Registry(config, LoadBoard(shared_numbers.private(LoadBoard.cells(2))))


def ready(registry: Registry) -> Worker:
    registry.set_state("prefill-0", "ready")
    return registry.workers["prefill-0"]


def addresses() -> PushAddresses:
    return PushAddresses(Engines(None), "tiny")


def address_of(known: PushAddresses, worker: Worker) -> str | None:
    address = known.next(worker)
    return None if address is None else str(json.loads(address.for_decode)["remote_engine_id"])


def engine_id_of(known: EngineIds, worker: Worker) -> str | None:
    transfer = known.next(worker)
    return None if transfer is None else transfer.engine_id


def test_many_requests_that_want_to_know_ask_a_prefill_once() -> None:
    """Each time it computes a token, and keeps the KV of that for its lease."""

    async def ask() -> None:
        async with prefill("one") as one:
            worker, known = ready(registry_of(config(one))), addresses()
            await asyncio.gather(*(known.learn(worker) for _ in range(5)))
            assert (one.asked, address_of(known, worker)) == (1, "one")

    asyncio.run(ask())


def test_who_has_asked_first_may_leave() -> None:
    async def ask() -> None:
        before = asyncio.Event()
        async with prefill("one", before) as one:
            worker, known = ready(registry_of(config(one))), addresses()
            first, second = (asyncio.ensure_future(known.learn(worker)) for _ in range(2))
            await one.is_asked()
            first.cancel()
            before.set()
            await second
            assert (one.asked, address_of(known, worker)) == (1, "one")

    asyncio.run(ask())


def test_all_that_wait_hear_of_a_failure() -> None:
    async def ask() -> None:
        async with prefill("one") as one:
            worker, known = ready(registry_of(config(one))), addresses()
            good, one.name = one.name, None  # type: ignore[assignment]  # an answer without its engine id
            results = await asyncio.gather(*(known.learn(worker) for _ in range(3)), return_exceptions=True)
            assert [type(result) for result in results] == [WorkerFailedError] * 3
            one.name = good
            await known.learn(worker)
            assert (one.asked, address_of(known, worker)) == (2, "one")

    asyncio.run(ask())


def test_a_refusal_is_no_fault_of_the_client() -> None:
    """A 4xx would go to the client as it is, and no other prefill would be tried."""

    async def ask() -> None:
        async with prefill("one") as one:
            worker, known = ready(registry_of(config(one))), addresses()
            one.status = b"404 Not Found"
            with pytest.raises(WorkerFailedError, match="prefill-0 refuses to say where it is") as raised:
                await known.learn(worker)
            assert (raised.value.error.status, raised.value.retry) == (502, True)

    asyncio.run(ask())


def test_what_is_learnt_of_a_life_that_has_ended_is_void() -> None:
    async def ask() -> None:
        before = asyncio.Event()
        async with prefill("one", before) as one:
            registry, known = registry_of(config(one)), addresses()
            worker = ready(registry)
            old = asyncio.ensure_future(known.learn(worker))
            await one.is_asked()
            registry.set_state("prefill-0", "dead")
            ready(registry)
            new = asyncio.ensure_future(known.learn(worker))
            await one.is_asked()
            before.set()
            await asyncio.gather(old, new)
            assert address_of(known, worker) == "one"

    asyncio.run(ask())


@pytest.mark.parametrize(
    ("known", "of"), [(addresses, address_of), (EngineIds, engine_id_of)], ids=["nixl-push", "mooncake"]
)
def test_another_worker_of_the_same_name_is_another_one(
    known: Callable[[], Any], of: Callable[[Any, Worker], str | None]
) -> None:
    """An admin removes it and adds one elsewhere, which is at the same life: what was learnt would be the old one's,
    and so would be what is asked."""

    async def replaced() -> None:
        async with prefill("first") as first, prefill("second") as second:
            registry, learnt = registry_of(config(first)), known()
            old = ready(registry)
            await learnt.learn(old)
            assert of(learnt, old) == "first"
            registry.remove("prefill-0")
            registry.add(config(second))
            new = ready(registry)
            assert new.life == old.life
            assert of(learnt, new) is None
            await learnt.learn(new)
            assert of(learnt, new) == "second"

    asyncio.run(replaced())


@pytest.mark.parametrize("protocol", [NixlPushProtocol, MooncakeProtocol])
def test_a_worker_that_is_gone_is_forgotten(protocol: type[NixlPushProtocol] | type[MooncakeProtocol]) -> None:
    """Names are an autoscaler's: there may be any number of them."""

    async def gone() -> None:
        async with prefill("one") as one:
            registry = registry_of(config(one))
            split = protocol(registry, Engines(None), "tiny")
            ready(registry)
            await split.background.drained()
            learnt = split._addresses if isinstance(split, NixlPushProtocol) else split._engine_ids
            assert len(learnt._known) == 1
            registry.remove("prefill-0")
            assert (learnt._known, learnt._turns) == ({}, {})

    asyncio.run(gone())
