"""Fewer acknowledgements for the streams of an engine.

Linux acknowledges a small segment as soon as it has been read; on a connection that it takes for an interactive one,
only every second one. A stream does not look interactive, because nothing is sent back, and the acknowledgement is a
sixth of the CPU time that the proxy spends on a chunk (tcp_cleanup_rbuf in net/ipv4/tcp.c). TCP_QUICKACK=0 makes a
connection an interactive one, until a chunk has waited 40 ms for its acknowledgement: so it is set again and again.

An engine's server with Nagle's algorithm on waits for the acknowledgement, up to 40 ms each time the option is set.
uvicorn's event loops, asyncio and uvloop, switch it off.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Final

_FIRST: Final = 8
"""Most answers that are no streams come in fewer pieces, and are not worth a system call."""
_EVERY: Final = 64


def is_option_due(reads: int) -> bool:
    """Return whether the option is to be set at this read of an answer, counted from 1."""
    return reads % _EVERY == _FIRST


def delay(transport: asyncio.BaseTransport) -> None:
    """Sets the option on a TCP connection, if it is open."""
    sock = transport.get_extra_info("socket")
    if sock is None:
        return
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 0)
    except (OSError, ValueError):
        # It has just been closed, which uvloop answers with a ValueError.
        return
