"""TLS towards clients: the certificate, and the listener.

The listener accepts by itself: the event loop tells of a TLS client only after its handshake, so that clients which
say nothing would count for nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections import Counter

from pdserve.errors import RecipeError
from pdserve.pd.http.front import Front
from pdserve.pd.http.places import PROBE_PLACES
from pdserve.pd.settings import Tls

log = logging.getLogger("pdserve.proxy")

_AT_ONCE = 64
"""Connections that are accepted in one turn of the loop."""
_NO_FILES_SECONDS = 0.2


class ClientTls:
    """The certificate that clients are shown. RecipeError: it cannot be used."""

    def __init__(self, settings: Tls) -> None:
        self._settings = settings
        self.context = _context(settings)
        """For the next connection."""

    def reload(self) -> str:
        """Reads the files again. What cannot be used changes nothing, and why is said."""
        try:
            self.context = _context(self._settings)
        except RecipeError as error:
            log.error("the certificate stays as it was: %s", error.what)
            return f"not usable: {error.what}"
        log.info("the certificate was read again")
        return "ok"


class TlsListener:
    """Accepts clients for a Front. Owns its socket, and the connections until their handshake is over."""

    def __init__(self, front: Front, tls: ClientTls, sock: socket.socket) -> None:
        self._front, self._tls, self._sock = front, tls, sock
        self._loop = asyncio.get_running_loop()
        self._opening: dict[asyncio.Task[None], socket.socket] = {}
        """Handshakes, the oldest first."""

    def start(self, backlog: int) -> None:
        self._sock.setblocking(False)
        self._sock.listen(backlog)
        self._loop.add_reader(self._sock, self._accept)

    def close(self) -> None:
        self._loop.remove_reader(self._sock)
        self._sock.close()
        for task in self._opening:
            task.cancel()

    def _accept(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                connection, _ = self._sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                log.warning("no client can be accepted: %s", error.strerror)
                self._loop.remove_reader(self._sock)
                self._loop.call_later(_NO_FILES_SECONDS, self._again)
                return
            if not self._has_room():
                connection.close()
                continue
            task = self._loop.create_task(self._open(connection))
            self._opening[task] = connection
            task.add_done_callback(self._opened)

    def _has_room(self) -> bool:
        """May end a handshake of somebody else for it (http.places): it may be one that is never begun."""
        most = self._front.limits.max_connections + PROBE_PLACES
        if len(self._opening) + len(self._front.connections) < most:
            return True
        if not self._opening:
            return False
        peers = {task: _peer(connection) for task, connection in self._opening.items()}
        ((busiest, _),) = Counter(peers.values()).most_common(1)
        oldest = next(task for task, peer in peers.items() if peer == busiest)
        with contextlib.suppress(OSError):
            self._opening.pop(oldest).shutdown(socket.SHUT_RDWR)
        return True

    def _opened(self, task: asyncio.Task[None]) -> None:
        self._opening.pop(task, None)

    def _again(self) -> None:
        if self._sock.fileno() >= 0:
            self._loop.add_reader(self._sock, self._accept)

    async def _open(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # What goes wrong here is the client's: it speaks no TLS, or says nothing.
        with contextlib.suppress(OSError):
            await self._loop.connect_accepted_socket(
                self._front,
                connection,
                ssl=self._tls.context,
                ssl_handshake_timeout=self._front.limits.header_seconds,
            )


def _peer(connection: socket.socket) -> str:
    try:
        return str(connection.getpeername()[0])
    except OSError:  # it has left
        return ""


def _context(settings: Tls) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(settings.certificate, settings.key)
    except (OSError, ssl.SSLError) as error:
        raise RecipeError(
            f"the certificate and key for clients cannot be used: {error}",
            where="proxy.tls",
            todo="see that both files exist, are PEM and belong together",
        ) from error
    return context
