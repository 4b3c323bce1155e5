"""Pooled connections to engines: what must hold when one passes from a request to the next."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from contextlib import suppress

import pytest
import uvloop

from pdserve.pd.http import delayed_acks
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


def test_a_connection_held_back_answers_the_next_request() -> None:
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
def test_what_was_sent_before_a_hang_up_arrives(answer: bytes, end: str) -> None:
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


# --- when the chunks of an engine's stream are acknowledged: TCP_QUICKACK shows whether Linux does it at once


STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
EVENT = b"data: {}\n\n"
READS = 80


class Looks(Sink):
    """Whether Linux acknowledges at once, seen at each piece of an answer; then the next one may come."""

    def __init__(self) -> None:
        self.at_once: list[bool] = []
        self.seen = asyncio.Event()
        self.over = asyncio.Event()
        self.transport: asyncio.BaseTransport

    def on_status(self, status: int, content_type: str) -> None:
        assert status == 200

    def on_data(self, data: bytes) -> None:
        assert data == EVENT
        option = self.transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK)
        self.at_once.append(bool(option))
        self.seen.set()

    def on_end(self) -> None:
        self.over.set()

    def on_sent(self) -> None:
        """Nothing waits for it."""

    def on_lost(self) -> None:
        raise AssertionError("the connection was lost")


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_stream_is_acknowledged_later_from_its_eighth_piece_on(loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    """Two streams over one connection."""

    async def run() -> list[list[bool]]:
        answers = [Looks(), Looks()]
        ended = asyncio.Event()

        async def engine(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            for looks in answers:
                await reader.readuntil(b"\r\n\r\n")
                head = STREAM
                for _ in range(READS):
                    looks.seen.clear()
                    writer.write(head + b"%x\r\n%b\r\n" % (len(EVENT), EVENT))
                    head = b""
                    await looks.seen.wait()
                writer.write(b"0\r\n\r\n")
            writer.close()
            ended.set()

        server = await asyncio.start_server(engine, "127.0.0.1", 0)
        pool = Pool(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", connect_timeout=60)
        connection = await pool.connect()
        for looks in answers:
            looks.transport = connection._transport
            connection.send(HEAD, b"", looks)
            await looks.over.wait()
        await ended.wait()
        pool.close()
        server.close()
        await server.wait_closed()
        return [looks.at_once for looks in answers]

    with asyncio.Runner(loop_factory=loop) as runner:
        first, second = runner.run(run())
    assert first[:7] == [True] * 7
    for at_once in (first, second):
        assert len(at_once) == READS
        # Not those between: 40 ms between two pieces, as on a busy machine, and Linux acknowledges at once again.
        assert not at_once[7]
        assert not at_once[71]


class ClosedByUvloop:
    """What uvloop's socket does when its handle is closed."""

    def setsockopt(self, *_: object) -> None:
        raise ValueError("negative file descriptor")


def test_a_connection_that_was_closed_is_left_alone() -> None:
    closed = socket.socket()
    closed.close()
    for sock in (None, closed, ClosedByUvloop()):
        delayed_acks.delay(asyncio.BaseTransport(extra={"socket": sock}))
