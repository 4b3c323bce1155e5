"""Fewer acknowledgements for the streams of an engine.

Linux acknowledges a small segment as soon as it has been read, until it takes a connection for an interactive one: then
every second one. An engine's stream never looks interactive, for nothing is sent back, and the acknowledgement of a
chunk takes a sixth of all that a proxy does for it (tcp_cleanup_rbuf). TCP_QUICKACK=0 says that it is; Linux takes
that back when a chunk comes 40 ms or more after another one, so it is repeated now and then.
An engine's server that waits for acknowledgements (Nagle's algorithm; uvicorn's event loops switch it off) is held up
by 40 ms each time it is said.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Final

_FIRST: Final = 8
"""Answers that come in fewer pieces are not worth a system call."""
_EVERY: Final = 64


def due(reads: int) -> bool:
    """Whether it is to be said at this read of a connection, counted from 1."""
    return reads % _EVERY == _FIRST


def delay(transport: asyncio.BaseTransport) -> None:
    """Says it for a connection over TCP."""
    try:
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 0)
    except OSError:
        # It is being closed.
        return
