"""Pooled connections to engines: what must hold when one passes from a request to the next."""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress

import pytest
import uvloop

from pdserve.pd.http.fetch import fetch
from pdserve.pd.http.upstream import Pool, Sink

HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: engine\r\ncontent-length: 0\r\n\r\n"
ANSWER = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"


class FallsBehind(Sink):
    """A sink whose client stops reading with the very last of an answer, and takes no notice of its end."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.ended = asyncio.Event()

    async def ask(self) -> None:
        self.connection = await self.pool.connect()
        self.connection.send(HEAD, b"", self)
        await self.ended.wait()

    def on_status(self, status: int, content_type: str) -> None:
        assert status == 200

    def on_data(self, data: bytes) -> None:
        self.connection.pause()

    def on_end(self) -> None:
        self.ended.set()

    def on_sent(self) -> None:
        """Nothing waits for it."""

    def on_lost(self) -> None:
        raise AssertionError("the connection was lost")


def test_a_connection_that_was_held_back_at_the_end_answers_the_next_request() -> None:
    served: set[asyncio.Task[None]] = set()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Every request of a connection, in order."""
        task = asyncio.current_task()
        assert task is not None
        served.add(task)
        with suppress(ConnectionResetError):
            while await reader.readline():
                while await reader.readline() != b"\r\n":
                    pass
                writer.write(ANSWER)
        writer.close()

    async def run() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        pool = Pool(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", connect_timeout=60)
        first = FallsBehind(pool)
        await first.ask()
        again = await fetch(pool, "POST", "/v1/completions", reuse=True, timeout=60)
        assert (again.status, again.body) == (200, b"{}")
        pool.close()
        server.close()
        await asyncio.wait(served)
        await server.wait_closed()

    asyncio.run(run())


def test_a_pool_that_has_failed_to_connect_can_be_closed() -> None:
    """uvloop makes the protocol before it connects."""

    async def run() -> None:
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            pool = Pool(f"http://127.0.0.1:{unused.getsockname()[1]}", connect_timeout=60)
            with pytest.raises(ConnectionRefusedError):
                await pool.connect()
        pool.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())


class Leaves(Sink):
    """A sink that hangs up as soon as its request is with the engine."""

    def __init__(self) -> None:
        self.data = b""
        self.over = asyncio.get_running_loop().create_future()

    def on_status(self, status: int, content_type: str) -> None:
        assert status == 200

    def on_data(self, data: bytes) -> None:
        self.data += data

    def on_end(self) -> None:
        self.over.set_result("ended")

    def on_sent(self) -> None:
        """The test hangs up."""

    def on_lost(self) -> None:
        self.over.set_result("lost")


@pytest.mark.parametrize(("answer", "end"), [(ANSWER, "ended"), (b"", "lost")])
def test_what_an_engine_has_sent_before_it_sees_its_client_hang_up_still_arrives(answer: bytes, end: str) -> None:
    seen: asyncio.Queue[bytes] = asyncio.Queue()

    async def engine(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.put_nowait(await reader.read())
        writer.write(answer)
        writer.close()

    async def run() -> None:
        server = await asyncio.start_server(engine, "127.0.0.1", 0)
        pool = Pool(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", connect_timeout=60)
        sink = Leaves()
        connection = await pool.connect()
        connection.send(HEAD, b"", sink)
        connection.hang_up()
        assert await asyncio.wait_for(seen.get(), 60) == HEAD
        assert await asyncio.wait_for(sink.over, 60) == end
        assert sink.data == (b"{}" if answer else b"")
        assert pool.take() is None
        pool.close()
        server.close()
        await server.wait_closed()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())


def test_a_pool_that_is_closed_fails_who_waits_for_an_answer() -> None:
    """A worker that was removed: whoever waits for it in the background would wait for ever."""

    async def run() -> None:
        asked = asyncio.Event()

        async def engine(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readline()
            asked.set()
            await reader.read()
            writer.close()

        server = await asyncio.start_server(engine, "127.0.0.1", 0)
        pool = Pool(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", connect_timeout=60)
        sink = Leaves()
        (await pool.connect()).send(HEAD, b"", sink)
        await asyncio.wait_for(asked.wait(), 60)
        pool.close()
        assert await asyncio.wait_for(sink.over, 60) == "lost"
        server.close()
        await server.wait_closed()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())
