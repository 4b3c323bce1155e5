"""A writer that never blocks its event loop, whatever the other side does."""

from __future__ import annotations

import asyncio
import os
import socket

from pdserve.system.pipe_writer import PipeWriter

MORE_THAN_ANY_BUFFER = 8 * 1024 * 1024


async def test_what_the_other_side_does_not_read_yet_waits_and_arrives_in_order() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        writer = PipeWriter(ours.fileno())
        writer.write(b"a" * MORE_THAN_ANY_BUFFER)
        writer.write(b"z")
        reader, closing = await asyncio.open_connection(sock=theirs.dup())
        read = await reader.readexactly(MORE_THAN_ANY_BUFFER + 1)
        await writer.sent()
        closing.close()
        await closing.wait_closed()
    assert read == b"a" * MORE_THAN_ANY_BUFFER + b"z"


async def test_a_socket_on_which_something_can_be_read_is_not_closed() -> None:
    """As behind sshd, where stdin and stdout are one socket."""

    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(b"an order that nobody has read yet")
        writer = PipeWriter(ours.fileno())
        await asyncio.sleep(0)
        writer.write(b"news")
        await writer.sent()
        outcome = theirs.recv(100)
    assert outcome == b"news"


async def test_a_peer_that_has_gone_is_no_error() -> None:
    read, write = os.pipe()
    writer = PipeWriter(write)
    os.close(read)
    writer.write(b"to nobody")
    writer.write(b"again")
    await writer.sent()
    os.close(write)
