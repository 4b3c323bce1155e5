"""Connections to engines: what must hold when one passes from a request to the next, or is lost, and what the proxy
learns over them."""

from __future__ import annotations

import asyncio
import json
import socket
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager, suppress
from pathlib import Path
from unittest.mock import Mock

import pytest

from pdserve.pd.config.proxy import WorkerConfig
from pdserve.pd.http import upstream
from pdserve.pd.http.fetch import fetch
from pdserve.pd.http.upstream import Pool, Sink, UpstreamConnection
from pdserve.pd.protocols.mooncake import EngineIds
from pdserve.pd.relay.leg import UNREAD_SECONDS, Leg, ignore_poke
from pdserve.pd.workers.registry import Registry, Worker
from tests.proxy.deployment import registry_of
from tests.proxy.raw import ANSWER as RAW_ANSWER
from tests.proxy.raw import CutError, RawEngine, Send, Serve, listening, post, raw_deployment, whole
from tests.proxy.test_relay_bytes import Wire

HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: engine\r\ncontent-length: 0\r\n\r\n"
ANSWER = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"


class Heard(Sink):
    """What comes of an answer, and how it is over."""

    def __init__(self) -> None:
        self.data = b""
        self.over: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def on_status(self, status: int, content_type: str) -> None:
        assert status == 200

    def on_data(self, data: bytes) -> None:
        self.data += data

    def on_end(self) -> None:
        self.over.set_result("ended")

    def on_sent(self) -> None:
        """Nothing waits for it."""

    def on_lost(self) -> None:
        self.over.set_result("lost")


class FallsBehind(Heard):
    """One whose client stops reading with the very last of an answer, and takes no notice of its end."""

    connection: UpstreamConnection

    def on_data(self, data: bytes) -> None:
        self.connection.pause()


@asynccontextmanager
async def pool_to(serve: Serve) -> AsyncIterator[Pool]:
    async with listening(serve) as url:
        pool = Pool(url, connect_timeout=60)
        yield pool
        pool.close()


async def test_a_connection_held_back_answers_the_next_request() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError):
            while await reader.readuntil(b"\r\n\r\n"):
                writer.write(ANSWER)

    async with pool_to(answer) as pool:
        first = FallsBehind()
        first.connection = await pool.connect()
        first.connection.send(HEAD, b"", first)
        assert await first.over == "ended"
        again = await fetch(pool, "POST", "/v1/completions", reuse=True, timeout=60)
        assert (again.status, again.body) == (200, b"{}")


async def test_a_pool_that_has_failed_to_connect_can_be_closed() -> None:
    """uvloop makes the protocol before it connects."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        pool = Pool(f"http://127.0.0.1:{unused.getsockname()[1]}", connect_timeout=60)
        with pytest.raises(ConnectionRefusedError):
            await pool.connect()
    pool.close()


@pytest.mark.parametrize(("answer", "end"), [(ANSWER, "ended"), (b"", "lost")])
async def test_what_was_sent_before_a_hang_up_arrives(answer: bytes, end: str) -> None:
    seen: asyncio.Queue[bytes] = asyncio.Queue()

    async def engine(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.put_nowait(await reader.read())
        writer.write(answer)

    async with pool_to(engine) as pool:
        sink, connection = Heard(), await pool.connect()
        connection.send(HEAD, b"", sink)
        connection.hang_up()
        assert (await seen.get(), await sink.over) == (HEAD, end)
        assert sink.data == (b"{}" if answer else b"")
        assert pool.take() is None


async def test_a_pool_that_is_closed_fails_who_waits_for_an_answer() -> None:
    """A worker that was removed: whoever waits for it in the background would wait for ever."""
    asked = asyncio.Event()

    async def engine(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        asked.set()
        await reader.read()

    async with pool_to(engine) as pool:
        sink = Heard()
        (await pool.connect()).send(HEAD, b"", sink)
        await asked.wait()
        pool.close()
        assert await sink.over == "lost"


# --- when the chunks of an engine's stream are acknowledged


def test_pieces_of_a_stream_are_acknowledged_later_and_a_connection_that_was_closed_is_left_alone() -> None:
    assert [reads for reads in range(1, 150) if upstream.is_option_due(reads)] == [8, 72, 136]
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as connection:
        upstream.delay(asyncio.BaseTransport(extra={"socket": connection}))
        assert not connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK)
    uvloops = Mock(setsockopt=Mock(side_effect=ValueError("negative file descriptor")))
    for sock in (None, connection, uvloops):
        upstream.delay(asyncio.BaseTransport(extra={"socket": sock}))


# --- a connection that served before is lost: only what no engine has read is sent again


REQUEST = post("/v1/completions", {"prompt": "hello world"})


@pytest.mark.parametrize("protocol", ["nixl", "mooncake"])
def test_what_an_engine_may_have_read_is_not_sent_again(tmp_path: Path, protocol: str) -> None:
    """Decode may have taken the KV, and its blocks may hold other prompts by now."""
    prefill, *decodes = engines = [RawEngine() for _ in range(3)]
    roles = ("prefill", "decode", "decode")
    workers = [
        {"name": f"{role}-{index}", "role": role, "url": engine.url, "bootstrap_url": engine.url}
        for index, (role, engine) in enumerate(zip(roles, engines, strict=True))
    ]
    limits = {"header_seconds": UNREAD_SECONDS + 0.5}
    to_lose: list[str] = []

    def keeps(send: Send) -> None:
        params = {"do_remote_prefill": True, "remote_request_id": f"kept-{len(prefill.seen)}"}
        send(whole(json.dumps(json.loads(RAW_ANSWER) | {"kv_transfer_params": params}).encode()))

    with raw_deployment(tmp_path, protocol=protocol, workers=workers, limits=limits) as raw, ExitStack() as ends:

        def answers(send: Send) -> None:
            if to_lose:
                to_lose.clear()
                with raw.client() as silent:
                    # The proxy ends a client that sends nothing, after longer than an unread request has.
                    silent.ended()
                raise CutError
            send(whole(RAW_ANSWER))

        for engine in engines:
            engine.script = keeps if engine is prefill else answers
            ends.callback(engine.close)
        warm = 4
        assert [raw.ask(REQUEST).status for _ in range(warm)] == [200] * warm
        assert all(decode.seen for decode in decodes)
        to_lose.append("the next one")
        assert raw.ask(REQUEST).status == 200
    # Without what withdraws a transfer of Mooncake: that is no prompt of a client.
    bodies = [json.loads(seen.body) for decode in decodes for seen in decode.seen if b"hello world" in seen.body]
    name = {"nixl": "remote_request_id", "mooncake": "transfer_id"}[protocol]
    uses = Counter(body["kv_transfer_params"][name] for body in bodies)
    assert set(uses.values()) == {1}
    assert (len(uses), len(prefill.seen)) == (warm + 2, warm + 2)


@asynccontextmanager
async def worker_of(received: list[bytes]) -> AsyncIterator[Worker]:
    """A worker that listens. `received`: what came over the connections that were made to it, once they are over."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        received.append(await reader.read())

    async with listening(serve) as url:
        registry = registry_of(
            "aggregated", WorkerConfig(name="one", role="aggregated", url=url), connect_timeout_seconds=60
        )
        try:
            yield registry.workers["one"]
        finally:
            registry.close()


def kept(worker: Worker) -> UpstreamConnection:
    """A connection that served before."""
    connection = UpstreamConnection(worker.pool)
    connection.connection_made(Wire())
    worker.pool.keep(connection)
    return connection


async def test_what_was_lost_at_once_is_sent_again() -> None:
    received: list[bytes] = []
    async with worker_of(received) as worker:
        lost, sent = kept(worker), asyncio.Event()
        leg = Leg(worker, b"head", b"body", sent.set)
        assert leg.reached
        leg.poke_on_reached = True
        lost.connection_lost(None)
        assert not leg.reached
        await sent.wait()
        assert (leg.reached, leg.failure) == (True, None)
        leg.close()


async def test_what_must_not_be_used_any_more_is_not_sent_again() -> None:
    received: list[bytes] = []
    async with worker_of(received) as worker:
        lost = kept(worker)
        leg = Leg(worker, b"head", b"body", ignore_poke, usable_until=worker.pool.now())
        lost.connection_lost(None)
        assert leg.failure is not None
        assert (leg.failure.retry, leg.reached) == (True, True)
        leg.close()
    assert received == []


async def test_what_is_too_old_on_connection_is_not_sent() -> None:
    received: list[bytes] = []
    async with worker_of(received) as worker:
        told = asyncio.Event()
        leg = Leg(worker, b"head", b"body", told.set, usable_until=worker.pool.now())
        await told.wait()
        assert leg.failure is not None
        assert (leg.failure.retry, leg.reached) == (True, False)
        leg.close()
    assert b"".join(received) == b""


# --- the engine ids that the proxy learns of a prefill: never those of another life, or of another of its name


class Prefill:
    """It answers every request with its name as its engine id, `before` which it waits."""

    def __init__(self, name: str, before: asyncio.Event | None = None) -> None:
        self.name, self.before = name, before
        self.asked = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        self.asked.set()
        if self.before is not None:
            await self.before.wait()
        writer.write(whole(json.dumps({"0": {"engine_id": self.name}}).encode()))


def config(url: str) -> WorkerConfig:
    return WorkerConfig(name="prefill-0", role="prefill", url=url, bootstrap_url=url)


def ready(registry: Registry) -> Worker:
    registry.set_state("prefill-0", "ready")
    return registry.workers["prefill-0"]


def engine_id_of(known: EngineIds, worker: Worker) -> str | None:
    transfer = known.next(worker)
    return None if transfer is None else transfer.engine_id


async def test_what_is_learnt_of_a_life_that_has_ended_is_void() -> None:
    one = Prefill("one", asyncio.Event())
    async with listening(one.serve) as url:
        registry, known = registry_of("mooncake", config(url)), EngineIds()
        worker = ready(registry)
        old = asyncio.ensure_future(known.learn(worker))
        await one.asked.wait()
        registry.set_state("prefill-0", "dead")
        ready(registry)
        assert one.before is not None
        one.before.set()
        await old
        assert engine_id_of(known, worker) is None
        await known.learn(worker)
        assert engine_id_of(known, worker) == "one"
        registry.close()


async def test_another_worker_of_the_same_name_is_another_one() -> None:
    """An admin removes it and adds one elsewhere, which is at the same life: what was learnt would be the old one's,
    and so would be what is asked."""
    async with listening(Prefill("first").serve) as first, listening(Prefill("second").serve) as second:
        registry, learnt = registry_of("mooncake", config(first)), EngineIds()
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
        registry.close()
