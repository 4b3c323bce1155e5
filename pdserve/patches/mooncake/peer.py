"""A prefill worker behind an address of Mooncake's side channel: is it still there?"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from pdserve.time_limit import time_limit

_PROBE_SECONDS = 2.0
_numbers = itertools.count()
_watching: set[asyncio.Task[None]] = set()
"""A loop holds no task that waits."""
_probing: dict[tuple[asyncio.AbstractEventLoop, str], asyncio.Task[bool]] = {}


async def refuses_connections(address: str) -> bool:
    """Tell whether no process listens at tcp://host:port any more.

    Only a refused connection is proof. A stopped process still has its kernel accept connections, and an address that
    cannot be reached may be one whose worker is alive and writes KV over another network: both are "no".

    All callers that ask about an address at the same time share a connection: when a prefill dies, all its pulls ask.
    An answer that was on its way when the prefill died does no harm: libzmq's next attempt to connect asks again.
    """
    key = (asyncio.get_running_loop(), address)
    probe = _probing.get(key)
    if probe is None:
        probe = _probing[key] = asyncio.get_running_loop().create_task(_refuses(address), context=contextvars.Context())
        probe.add_done_callback(lambda _: _probing.pop(key))
    return await asyncio.shield(probe)


async def _refuses(address: str) -> bool:
    parts = urlsplit(address)
    try:
        async with time_limit(_PROBE_SECONDS):
            _, writer = await asyncio.open_connection(parts.hostname, parts.port)
    except ConnectionRefusedError:
        return True
    except (OSError, TimeoutError):
        return False
    writer.close()
    return False


def watch(sock: Any, address: str, *, lost: Callable[[], None], reconnecting: Callable[[], None]) -> None:
    """Call `lost`, perhaps several times, when no process listens at `address` any more, until `sock` is closed.

    `reconnecting` is called when the connection broke although a process listens: an answer to what was sent on it can
    no longer arrive, because a ROUTER knows a connection that was made anew under another identity.

    `sock` is one of a zmq.asyncio.Context, in the running loop. The task has no other end than that of `sock` or of
    their context, and must not be cancelled: an event that no socket takes blocks the thread of libzmq that reports it,
    and with it every other socket of the context.
    """
    import zmq

    inner = f"inproc://pdserve-monitor-{next(_numbers)}"
    sock.monitor(inner, zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED | zmq.EVENT_MONITOR_STOPPED)
    monitor = sock.context.socket(zmq.PAIR)
    monitor.setsockopt(zmq.LINGER, 0)
    monitor.connect(inner)
    task = asyncio.get_running_loop().create_task(
        _watch(monitor, address, lost, reconnecting), context=contextvars.Context()
    )
    _watching.add(task)
    task.add_done_callback(_watching.discard)


async def _watch(monitor: Any, address: str, lost: Callable[[], None], reconnecting: Callable[[], None]) -> None:
    import zmq
    from zmq.utils.monitor import parse_monitor_message

    with monitor, suppress(zmq.ContextTerminated):
        while (event := parse_monitor_message(await monitor.recv_multipart())["event"]) != zmq.EVENT_MONITOR_STOPPED:
            if await refuses_connections(address):
                lost()
            elif event == zmq.EVENT_DISCONNECTED:
                reconnecting()
