"""Readiness: probes, and the one wait that every start goes through.

A wait races readiness against death. Death wins at once, a process that lives but never becomes ready ends at its
time limit, and an answer counts only if the listening socket belongs to the process that we started: a stale server
on the port answers 200 while ours is still dying.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import struct
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from pdserve.plan.process import HttpProbe, LmcacheProbe
from pdserve.system import procfs
from pdserve.time_limit import time_limit

if TYPE_CHECKING:
    import httpcore

DeathT = TypeVar("DeathT")

PROBE_SECONDS = 3.0
"""One try: an HTTP server that accepts but does not answer must not hold a wait for longer."""
_IDLE_SECONDS = 5.0
"""After which a connection that is not used is closed."""
_TIMEOUTS = dict.fromkeys(("connect", "read", "write", "pool"), PROBE_SECONDS)
INTERVAL_SECONDS = 0.1
_PROVEN_AGAIN = 15
"""Checks after which a connection that lasts is no proof any more: its server may have stopped listening."""


@cache
def unverified_tls() -> ssl.SSLContext:
    """Return TLS towards the deployment's own proxy (`proxy.tls`): encrypted as its clients must be, not verified.

    Its certificate names what clients call it, not the address that we ask, and may be signed by a site's own
    authority. That the proxy is ours is known better: a probe asks the kernel whose socket it is. It reads no
    certificates of the machine, which takes 30 ms and 1 MiB."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


@dataclass(frozen=True)
class ProbeAnswer:
    """Holds the answer to one try. `text` is for people: the last answer is part of every failure report."""

    ready: bool
    text: str


@dataclass(frozen=True)
class WaitOutcome(Generic[DeathT]):
    """Tells how a wait ended: exactly one of ready, died (with the death), late (neither)."""

    ready: bool
    died: DeathT | None
    seconds: float
    last_answer: str


async def wait_ready(
    probe: Callable[[], Awaitable[ProbeAnswer]],
    *,
    death: asyncio.Future[DeathT],
    seconds: float,
    clock: Callable[[], float],
    interval: float = INTERVAL_SECONDS,
) -> WaitOutcome[DeathT]:
    """Probes until ready, death or the limit, whichever is first; a death is noticed without waiting for a probe.

    `death` is a future that its owner completes; it is awaited, never cancelled. `clock` counts in seconds.
    """
    start = clock()
    last_answer = "no answer yet"
    while True:
        attempt = asyncio.ensure_future(probe())
        remaining = seconds - (clock() - start)
        try:
            racing: set[asyncio.Future[Any]] = {attempt, death}
            await asyncio.wait(racing, timeout=max(0.0, remaining), return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not attempt.done():
                attempt.cancel()
        if death.done():
            return WaitOutcome(ready=False, died=death.result(), seconds=clock() - start, last_answer=last_answer)
        if attempt.done() and not attempt.cancelled():
            answer = attempt.result()
            last_answer = answer.text
            if answer.ready:
                return WaitOutcome(ready=True, died=None, seconds=clock() - start, last_answer=last_answer)
        remaining = seconds - (clock() - start)
        if remaining <= 0:
            return WaitOutcome(ready=False, died=None, seconds=clock() - start, last_answer=last_answer)
        await asyncio.wait({death}, timeout=min(interval, remaining))


class Prober:
    """Runs the probes of a plan. `family` gives the live PIDs of the process that must own the socket."""

    def __init__(self, family: Callable[[], set[int]]) -> None:
        self._family = family
        self._connections: httpcore.AsyncConnectionPool | None = None
        self._proven: object = None
        """Our end of a connection whose other end is ours."""
        self._checks = 0

    async def check(self, probe: HttpProbe | LmcacheProbe) -> ProbeAnswer:
        """Try once, with either kind of probe; never raises for an answer that is merely wrong or missing."""
        self._checks += 1
        if self._checks % _PROVEN_AGAIN == 0:
            self._proven = None
        if self._proven is None:
            # The kernel's table of sockets takes milliseconds to read: not ten times a second while nothing is there.
            if await _refuses_connections(probe.host, probe.port):
                return ProbeAnswer(False, f"nothing listens on port {probe.port} of {probe.host}")
            if (stranger := self._stranger(probe.port)) is not None:
                return ProbeAnswer(False, stranger)
        if isinstance(probe, HttpProbe):
            return await self._http(probe.host, probe.port, probe.path, probe.body_contains, probe.scheme)
        alive = await self._http(probe.host, probe.port, "/healthcheck", None)
        if not alive.ready:
            return alive
        # Quoted: an id must not match as the prefix of another one.
        return await self._http(probe.host, probe.port, "/config", f'"{probe.instance_id}"')

    def _stranger(self, port: int) -> str | None:
        """Say what is wrong with who listens on a port; None: it is ours."""
        if not (inodes := procfs.listeners(port)):
            return f"nothing listens on port {port}"
        if not procfs.owners(inodes, self._family()):
            return f"port {port} belongs to a process that is not ours: {procfs.listener_owner(port)}"
        return None

    async def _http(self, host: str, port: int, path: str, contains: str | None, scheme: str = "http") -> ProbeAnswer:
        import httpcore

        if self._connections is None:
            self._connections = httpcore.AsyncConnectionPool(
                ssl_context=unverified_tls(), keepalive_expiry=_IDLE_SECONDS
            )
        url, limits = f"{scheme}://{host}:{port}{path}", {"timeout": _TIMEOUTS}
        try:
            async with self._connections.stream("GET", url, extensions=limits) as response:
                # Asked before the body's end, after which the connection may be closed.
                connection = response.extensions["network_stream"].get_extra_info("client_addr")
                text = (await response.aread()).decode(errors="replace")
        except (httpcore.NetworkError, httpcore.ProtocolError, httpcore.TimeoutException, OSError) as error:
            self._proven = None
            return ProbeAnswer(False, f"GET {path}: {type(error).__name__}")
        # As long as a connection lives, the process at its other end is the one that was proven ours.
        if connection != self._proven:
            if (stranger := self._stranger(port)) is not None:
                return ProbeAnswer(False, stranger)
            self._proven = connection
        if response.status != 200:
            return ProbeAnswer(False, f"GET {path}: {response.status} {text[:200]}")
        if contains is not None and contains not in text:
            return ProbeAnswer(False, f"GET {path}: another instance answers on port {port}")
        return ProbeAnswer(True, f"GET {path}: 200")

    async def close(self) -> None:
        """Closes the connections."""
        if self._connections is not None:
            await self._connections.aclose()


async def _refuses_connections(host: str, port: int) -> bool:
    """Tell whether connections are refused there. The probe itself notices other faults."""
    try:
        async with time_limit(PROBE_SECONDS):
            _, writer = await asyncio.open_connection(host, port)
    except ConnectionRefusedError:
        return True
    except (OSError, TimeoutError):
        return False
    to_itself: bool = writer.get_extra_info("sockname") == writer.get_extra_info("peername")
    if to_itself:
        # The kernel took the port itself for our end, as it may where nothing listens. Closed in order, it would be
        # kept from its owner for a minute.
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.close()
    return to_itself
