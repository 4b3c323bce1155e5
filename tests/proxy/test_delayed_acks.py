"""When the chunks of an engine's stream are acknowledged: TCP_QUICKACK shows whether Linux does it at once."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

import pytest
import uvloop

from pdserve.pd.http import delayed_acks
from pdserve.pd.http.upstream import Pool, Sink

HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: engine\r\ncontent-length: 0\r\n\r\n"
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
