"""A connection that served before is lost: only what no engine has read is sent again."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from pdserve.pd.http.upstream import UpstreamConnection
from pdserve.pd.processes import shared_numbers
from pdserve.pd.relay.leg import UNREAD_SECONDS, Leg, never
from pdserve.pd.workers.load import LoadBoard
from pdserve.pd.workers.registry import Registry, Worker
from tests.proxy.deployment import proxy_config
from tests.proxy.raw import ANSWER, CutError, RawEngine, Send, post, raw_deployment, whole
from tests.proxy.test_relay_bytes import Wire

REQUEST = post("/v1/completions", {"prompt": "hello world"})


@pytest.mark.process
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
        send(whole(json.dumps(json.loads(ANSWER) | {"kv_transfer_params": params}).encode()))

    with raw_deployment(tmp_path, protocol=protocol, workers=workers, limits=limits) as raw, ExitStack() as ends:

        def answers(send: Send) -> None:
            if to_lose:
                to_lose.clear()
                with raw.client() as silent:
                    # The proxy ends a client that sends nothing, after longer than an unread request has.
                    silent.ended()
                raise CutError
            send(whole(ANSWER))

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


class Lab:
    """A worker that listens, and what came over the connections that were made to it."""

    def __init__(self, worker: Worker, received: list[bytes], served: set[asyncio.Task[None]]) -> None:
        self.worker, self.received = worker, received
        self._served = served

    def kept(self) -> UpstreamConnection:
        """A connection that served before."""
        connection = UpstreamConnection(self.worker.pool)
        connection.connection_made(Wire())
        self.worker.pool.keep(connection)
        return connection

    async def ended(self) -> None:
        """All connections that it has accepted are over."""
        while self._served:
            await asyncio.wait(self._served)


def run(test: Callable[[Lab], Coroutine[Any, Any, None]]) -> None:
    received: list[bytes] = []
    served: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        served.add(task)
        task.add_done_callback(served.discard)
        received.append(b"")
        with suppress(ConnectionResetError):
            while data := await reader.read(1000):
                received[-1] += data
        writer.close()

    async def main() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        worker = {"name": "one", "role": "aggregated", "url": url}
        config = proxy_config(protocol="aggregated", workers=[worker], connect_timeout_seconds=60)
        registry = Registry(config, LoadBoard(shared_numbers.private(LoadBoard.cells(1))))
        lab = Lab(registry.workers["one"], received, served)
        await test(lab)
        registry.close()
        await lab.ended()
        server.close()
        await server.wait_closed()

    asyncio.run(main())


def test_what_was_lost_at_once_is_sent_again() -> None:
    async def test(lab: Lab) -> None:
        lost, sent = lab.kept(), asyncio.Event()
        leg = Leg(lab.worker, b"head", b"body", sent.set)
        assert leg.reached
        leg.poke_on_reached = True
        lost.connection_lost(None)
        assert not leg.reached
        await sent.wait()
        assert (leg.reached, leg.failure) == (True, None)
        leg.close()

    run(test)


def test_what_must_not_be_used_any_more_is_not_sent_again() -> None:
    async def test(lab: Lab) -> None:
        lost = lab.kept()
        leg = Leg(lab.worker, b"head", b"body", never, usable_until=lab.worker.pool.now())
        lost.connection_lost(None)
        assert leg.failure is not None
        assert (leg.failure.retry, leg.reached) == (True, True)
        leg.close()
        assert lab.received == []

    run(test)


def test_what_is_too_old_on_connection_is_not_sent() -> None:
    async def test(lab: Lab) -> None:
        told = asyncio.Event()
        leg = Leg(lab.worker, b"head", b"body", told.set, usable_until=lab.worker.pool.now())
        await told.wait()
        assert leg.failure is not None
        assert (leg.failure.retry, leg.reached) == (True, False)
        leg.close()
        await lab.ended()
        assert b"".join(lab.received) == b""

    run(test)
