"""Whether the prefill worker behind an address of Mooncake's side channel is still there."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

_PROBE_SECONDS = 2.0
_numbers = itertools.count()


async def refuses(address: str) -> bool:
    """Whether nobody listens at tcp://host:port any more.

    Only a refused connection says so. A stopped process still has its kernel accept connections, and an address that
    cannot be reached may be one whose worker is alive and writes KV over another network: both are "no".
    """
    parts = urlsplit(address)
    try:
        async with asyncio.timeout(_PROBE_SECONDS):
            _, writer = await asyncio.open_connection(parts.hostname, parts.port)
    except ConnectionRefusedError:
        return True
    except (OSError, TimeoutError):
        return False
    writer.close()
    return False


def monitored(sock: Any) -> Any:
    """A socket on which libzmq reports that the connection of `sock` broke or could not be made again."""
    import zmq

    address = f"inproc://pdserve-monitor-{next(_numbers)}"
    sock.monitor(address, zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED | zmq.EVENT_MONITOR_STOPPED)
    monitor = sock.context.socket(zmq.PAIR)
    monitor.setsockopt(zmq.LINGER, 0)
    monitor.connect(address)
    return monitor


async def gone(monitor: Any, address: str, *, reconnecting: Callable[[], None]) -> bool:
    """Returns True when nobody listens at `address` any more, and False when the monitored socket is closed.

    `reconnecting` is called when the connection broke although somebody listens: an answer to what was sent on it can
    no longer arrive, because a ROUTER knows a connection that was made anew under another identity.
    """
    import zmq
    from zmq.utils.monitor import parse_monitor_message

    try:
        while True:
            event = parse_monitor_message(await monitor.recv_multipart())["event"]
            if event == zmq.EVENT_MONITOR_STOPPED:
                return False
            if await refuses(address):
                return True
            if event == zmq.EVENT_DISCONNECTED:
                reconnecting()
    except zmq.ContextTerminated:
        return False
