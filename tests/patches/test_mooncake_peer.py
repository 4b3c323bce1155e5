"""libzmq's reports on the connection to a prefill worker, over real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq
import zmq.asyncio

from pdserve.patches.mooncake import peer

PULLS = 60
LIMIT_SECONDS = 20


@asynccontextmanager
async def prefill() -> AsyncIterator[tuple[str, Any]]:
    """Address and socket of a side channel that nobody answers on."""
    with zmq.asyncio.Context() as context, context.socket(zmq.ROUTER) as sock:
        sock.setsockopt(zmq.LINGER, 0)
        yield f"tcp://127.0.0.1:{sock.bind_to_random_port('tcp://127.0.0.1')}", sock


@pytest.fixture
def context() -> Iterator[zmq.asyncio.Context]:
    with zmq.asyncio.Context() as context:
        yield context


@asynccontextmanager
async def pull(context: Any, address: str, *, lost: Callable[[], None] = lambda: None) -> AsyncIterator[Any]:
    with context.socket(zmq.DEALER) as sock:
        sock.setsockopt(zmq.LINGER, 0)
        sock.connect(address)
        peer.watch(sock, address, lost=lost, reconnecting=lambda: None)
        await sock.send(b"what is wanted")
        yield sock


def open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


async def fewer_open_files_than(number: int) -> None:
    while open_files() >= number:
        await asyncio.sleep(0.01)


def test_pulls_that_end_leave_no_socket_behind_and_a_prefill_that_goes_is_noticed(
    context: zmq.asyncio.Context,
) -> None:
    """A libzmq thread that is blocked by one report closes no socket, and makes no connection, any more."""

    async def pulls() -> None:
        async with prefill() as (address, sock), asyncio.timeout(LIMIT_SECONDS):
            before = open_files()
            for number in range(PULLS):
                async with pull(context, address):
                    if number % 2:  # its connection is made
                        await sock.recv_multipart()
            await fewer_open_files_than(before + PULLS)
            gone = asyncio.Event()
            async with pull(context, address, lost=gone.set):
                sock.close(0)
                await gone.wait()

    asyncio.run(pulls())
    assert not peer._watching


def test_a_prefill_that_is_not_there_is_noticed(context: zmq.asyncio.Context) -> None:
    async def absent() -> None:
        async with prefill() as (address, _):
            pass
        gone = asyncio.Event()
        async with asyncio.timeout(LIMIT_SECONDS), pull(context, address, lost=gone.set):
            await gone.wait()

    asyncio.run(absent())


def test_all_pulls_that_ask_about_a_prefill_at_once_share_one_connection() -> None:
    """When a prefill dies every pull from it asks; a pull's share of the descriptors has none for that."""
    connections = 0

    def count(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        writer.close()

    async def asked() -> list[set[bool]]:
        async with asyncio.timeout(LIMIT_SECONDS), await asyncio.start_server(count, "127.0.0.1", 0) as server:
            address = "tcp://{}:{}".format(*server.sockets[0].getsockname())
            there = await asyncio.gather(*(peer.refuses_connections(address) for _ in range(PULLS)))
            while not connections:
                await asyncio.sleep(0)
        gone = await asyncio.gather(*(peer.refuses_connections(address) for _ in range(PULLS)))
        return [set(there), set(gone)]

    assert asyncio.run(asked()) == [{False}, {True}]
    assert connections == 1
    assert not peer._probing
