"""The proxy's listening sockets, and its end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import signal
import socket
from collections.abc import Callable
from functools import partial
from typing import Protocol

import uvloop

from pdserve.pd.config.proxy import ProxyConfig
from pdserve.pd.http.connecting import factory
from pdserve.pd.http.connection import Connection
from pdserve.pd.http.front import SWEEP_SECONDS, Front
from pdserve.pd.http.front import ClientLimits as FrontLimits
from pdserve.pd.processes.supervisor import RETIRE, SIGNALS
from pdserve.pd.serve.client_tls import ClientTls, TlsListener
from pdserve.time_limit import time_limit

log = logging.getLogger("pdserve.proxy")

RESERVED = 64
"""For health checks, probes of the proxy (http.places), listeners, logs, KV events and libraries."""


def raised_limit() -> int:
    """Raise the soft limit of descriptors as far as it may go, and return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
    return 1 << 31 if soft == resource.RLIM_INFINITY else soft


def clients_that_fit(wanted: int, legs: int) -> int:
    """Return how many clients may be connected, at most `wanted`, if each of them may need so many connections to
    engines."""
    limit = raised_limit()
    fit = max(1, (limit - RESERVED) // (1 + legs))
    if fit < wanted:
        log.warning(
            "max_connections is %d and not %d: this process may have %d open files (ulimit -Hn), and a request takes "
            "up to %d beside its client's",
            fit,
            wanted,
            limit,
            legs,
        )
    return min(wanted, fit)


_BACKLOG = 2048
_BODIES = 8
"""Of the largest size, that may be in memory at once."""
_RETIRING_SECONDS = 1.0
"""For clients whose connection was accepted just before a successor took over to end their handshake and to send their
request."""
_LAST_WORDS_SECONDS = 1.0
"""For the errors of requests that were cut at the end of the drain to reach their clients."""
_SUCCESSOR_SECONDS = 60.0
"""A process that is told to end waits no longer for one that takes its place."""


class ServedGateway(Protocol):
    """The gateway, as a server needs it."""

    tls: ClientTls | None
    """None: clients speak plain HTTP."""

    def begin(self) -> None:
        """Begin: the loop runs, and nothing is accepted yet."""

    def begin_reload(self) -> None:
        """Read again what may change while serving (SIGHUP)."""

    def leave(self) -> None:
        """Leave what the processes share to another one, which is about to take this one's place."""

    async def retire(self) -> None:
        """Give up what only one process can have: another one serves from now on."""

    def stop_holding(self) -> None:
        """Answer who waits for an engine at once, and who comes from now on: a signal ends the proxy."""

    def drain(self) -> None:
        """Take no new connection from now on."""

    def busy(self) -> bool:
        """Tell whether a request is being answered."""

    def cut(self) -> None:
        """End what is still running: the drain is over."""

    async def finish(self, seconds: float) -> None:
        """Ends everything; what runs in the background gets this long."""


def front_limits(config: ProxyConfig) -> FrontLimits:
    limits = config.limits
    return FrontLimits(
        max_body_bytes=config.max_body_bytes,
        max_header_bytes=limits.max_header_bytes,
        header_seconds=limits.header_seconds,
        body_idle_seconds=limits.body_idle_seconds,
        body_seconds=limits.body_seconds,
        keep_alive_seconds=limits.keep_alive_seconds,
        max_connections=clients_that_fit(limits.max_connections, legs=1 if config.protocol == "aggregated" else 2),
        write_buffer_bytes=limits.write_buffer_bytes,
        max_buffered_bytes=limits.max_buffered_bytes or _BODIES * config.max_body_bytes,
    )


class ProxyServer:
    """Serves in one event loop: it accepts, drains on SIGINT, and ends. A second SIGINT ends it at once. On RETIRE it
    leaves new connections to its successor, and drains; on SIGTERM it asks for a successor, which its parent then
    makes."""

    def __init__(
        self,
        config: ProxyConfig,
        front: Front,
        served: ServedGateway,
        sock: socket.socket,
        told: asyncio.Event,
        serving: Callable[[], None],
        leaving: Callable[[], None],
    ) -> None:
        """Prepare the server. `told`: set once this process knows the workers' states, before which it would refuse
        what its siblings serve. `serving`: called when connections are accepted. `leaving`: asks for a successor."""
        self._told, self._serving, self._ask_for_successor = told, serving, leaving
        self._asked = False
        self._leaving = asyncio.Event()
        self._config, self._front, self._served, self._sock = config, front, served, sock
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()

    async def run(self) -> None:
        """Serve until a signal ends it."""
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signum, self._signalled, signum)
        loop.add_signal_handler(RETIRE, self._leaving.set)
        loop.add_signal_handler(signal.SIGHUP, self._served.begin_reload)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        self._served.begin()
        await self._told.wait()
        server = await self._listen()
        sweeper = loop.create_task(self._sweep())
        host, port = self._sock.getsockname()[:2]
        log.info("serving on http%s://%s:%d", "s" if self._config.tls else "", host, port)
        self._serving()
        await self._leaving.wait()
        log.info("draining")
        server.close()
        if not self._stop.is_set():
            # The next request of a connection is answered with the word that it is the last one.
            self._front.closing = True
            await self._served.retire()
            with contextlib.suppress(TimeoutError):
                async with time_limit(_RETIRING_SECONDS):
                    await self._stop.wait()
        if isinstance(server, TlsListener):
            server.end_handshakes()
        self._served.drain()
        self._front.close_idle()
        began = loop.time()
        await self._until_quiet(self._config.drain_seconds)
        if self._served.busy():
            self._served.cut()
            await self._until_quiet(_LAST_WORDS_SECONDS)
        await self._served.finish(max(0.0, self._config.drain_seconds - (loop.time() - began)))
        self._front.abort()
        sweeper.cancel()

    async def _listen(self) -> asyncio.Server | TlsListener:
        if self._served.tls is None:
            loop = asyncio.get_running_loop()
            return await loop.create_server(
                factory(partial(Connection, self._front)), sock=self._sock, backlog=_BACKLOG
            )
        listener = TlsListener(self._front, self._served.tls, self._sock)
        listener.start(_BACKLOG)
        return listener

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            self._front.sweep()

    async def _until_quiet(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        while self._active() and loop.time() < end and not self._hurry.is_set():  # noqa: ASYNC110  (three counters, at the end of a life: polled)
            await asyncio.sleep(0.02)

    def _active(self) -> bool:
        return self._served.busy() or self._front.unsent() or self._front.arriving()

    def _signalled(self, signum: signal.Signals) -> None:
        if signum == signal.SIGTERM and not (self._asked or self._leaving.is_set()):
            self._asked = True
            self._served.leave()
            self._ask_for_successor()
            asyncio.get_running_loop().call_later(_SUCCESSOR_SECONDS, self._leaving.set)
            return
        if self._stop.is_set() and signum == signal.SIGINT:
            # A second Ctrl-C: the user at the terminal does not want to wait.
            self._hurry.set()
        self._stop.set()
        self._served.stop_holding()
        self._leaving.set()


def new_loop() -> asyncio.AbstractEventLoop:
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop
