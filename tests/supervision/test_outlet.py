"""A writer that never blocks its event loop, whatever the other side does."""

from __future__ import annotations

import asyncio
import os
import socket

from pdserve.system.pipe_writer import PipeWriter

MORE_THAN_ANY_BUFFER = 8 * 1024 * 1024


def test_what_the_other_side_does_not_read_yet_waits_and_arrives_in_order() -> None:
    async def scenario() -> bytes:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            outlet = PipeWriter(ours.fileno())
            outlet.write(b"a" * MORE_THAN_ANY_BUFFER)
            outlet.write(b"z")
            reader, writer = await asyncio.open_connection(sock=theirs.dup())
            read = await reader.readexactly(MORE_THAN_ANY_BUFFER + 1)
            await outlet.sent()
            writer.close()
            await writer.wait_closed()
            return read

    read = asyncio.run(scenario())
    assert read == b"a" * MORE_THAN_ANY_BUFFER + b"z"


def test_a_socket_on_which_something_can_be_read_is_not_closed() -> None:
    """As behind sshd, where stdin and stdout are one socket."""

    async def scenario() -> bytes:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            theirs.sendall(b"an order that nobody has read yet")
            outlet = PipeWriter(ours.fileno())
            await asyncio.sleep(0)
            outlet.write(b"news")
            await outlet.sent()
            return theirs.recv(100)

    assert asyncio.run(scenario()) == b"news"


def test_a_peer_that_has_gone_is_no_error() -> None:
    async def scenario() -> None:
        read, write = os.pipe()
        outlet = PipeWriter(write)
        os.close(read)
        outlet.write(b"to nobody")
        outlet.write(b"again")
        await outlet.sent()
        os.close(write)

    asyncio.run(scenario())
