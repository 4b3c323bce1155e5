"""TLS towards clients: the certificate, and the listener.

The listener accepts by itself: the event loop reports a TLS client only after its handshake, so that clients which
send nothing would not be counted. Each handshake has buffers of 0.4 MB, so there is a limit to how many there are at
once; further clients wait to be accepted.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections import Counter
from functools import partial
from pathlib import Path

from pdserve.errors import RecipeError
from pdserve.pd.config.settings import TlsSettings
from pdserve.pd.file_reads import read_regular
from pdserve.pd.http.connecting import factory
from pdserve.pd.http.connection import Connection
from pdserve.pd.http.front import Front
from pdserve.pd.http.places import PROBE_PLACES
from pdserve.pd.serve import allocator

log = logging.getLogger("pdserve.proxy")

_AT_ONCE = 64
"""Connections that are accepted in one turn of the loop."""
_NO_FILES_SECONDS = 0.2
_HANDSHAKES = 256
"""At once. One takes a few milliseconds of the loop and two round trips."""
_PATIENCE_SECONDS = 1.0
"""What a handshake may take while others wait for its place."""
_FULL_SECONDS = 0.02
_LARGE_BYTES = 128 * 1024
"""The buffer of a connection is larger."""


class ClientTls:
    """The certificate that clients are shown. Raises RecipeError when it cannot be used."""

    def __init__(self, settings: TlsSettings) -> None:
        self._settings = settings
        self.context = _context(settings)
        """For the next connection."""

    def reload(self) -> str:
        """Read the files again, beside the event loop (file_reads). What cannot be used changes nothing; the answer has
        the reason."""
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
        self._opening: dict[asyncio.Task[None], tuple[socket.socket, float]] = {}
        """Handshakes and the loop times at which they began, the oldest first."""
        # asyncio has a buffer of 256 KiB for each TLS connection, of which most is never written to: so much of it is
        # never memory, and what is goes back to the system when the connection ends.
        allocator.return_from(_LARGE_BYTES)

    def start(self, backlog: int) -> None:
        self._sock.setblocking(False)
        self._sock.listen(backlog)
        self._loop.add_reader(self._sock, self._accept)

    def close(self) -> None:
        """Accepts no more. The handshakes that have begun go on."""
        self._loop.remove_reader(self._sock)
        self._sock.close()

    def end_handshakes(self) -> None:
        for task in self._opening:
            task.cancel()

    def _accept(self) -> None:
        for _ in range(_AT_ONCE):
            if len(self._opening) >= _HANDSHAKES and not self._end_slow_handshake():
                self._pause(_FULL_SECONDS)
                return
            try:
                connection, _ = self._sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                log.warning("no client can be accepted: %s", error.strerror)
                self._pause(_NO_FILES_SECONDS)
                return
            if not self._has_room():
                connection.close()
                continue
            task = self._loop.create_task(self._open(connection))
            self._opening[task] = connection, self._loop.time()
            task.add_done_callback(self._opened)

    def _has_room(self) -> bool:
        """Tell whether another connection may be accepted. This may end another client's handshake for it
        (http.places): it may be one that is never begun."""
        most = self._front.limits.max_connections + PROBE_PLACES
        if len(self._opening) + len(self._front.connections) < most:
            return True
        return self._end_handshake(patience=0.0)

    def _end_slow_handshake(self) -> bool:
        return self._end_handshake(patience=_PATIENCE_SECONDS)

    def _end_handshake(self, patience: float) -> bool:
        """Ends the oldest handshake of the client with the most, if it has taken longer than that."""
        if not self._opening:
            return False
        peers = {task: _peer(connection) for task, (connection, _) in self._opening.items()}
        ((busiest, _),) = Counter(peers.values()).most_common(1)
        oldest = next(task for task, peer in peers.items() if peer == busiest)
        connection, began = self._opening[oldest]
        if self._loop.time() - began < patience:
            return False
        del self._opening[oldest]
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
        return True

    def _pause(self, seconds: float) -> None:
        """Accept no connection for a while: they wait in the socket."""
        self._loop.remove_reader(self._sock)
        self._loop.call_later(seconds, self._again)

    def _opened(self, task: asyncio.Task[None]) -> None:
        self._opening.pop(task, None)

    def _again(self) -> None:
        if self._sock.fileno() >= 0:
            self._loop.add_reader(self._sock, self._accept)

    async def _open(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # What goes wrong here is the client's: it speaks no TLS, or sends nothing.
        with contextlib.suppress(OSError):
            await self._loop.connect_accepted_socket(
                factory(partial(Connection, self._front)),
                connection,
                ssl=self._tls.context,
                ssl_handshake_timeout=self._front.limits.header_seconds,
            )


def _peer(connection: socket.socket) -> str:
    try:
        return str(connection.getpeername()[0])
    except OSError:  # it has left
        return ""


def _context(settings: TlsSettings) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        for path in (settings.certificate, settings.key):
            read_regular(Path(path))  # OpenSSL reads a device for ever
        context.load_cert_chain(settings.certificate, settings.key)
    except (OSError, ssl.SSLError) as error:
        raise RecipeError(
            f"the certificate and key for clients cannot be used: {error}",
            where="proxy.tls",
            todo="see that both files exist, are PEM and belong together",
        ) from error
    return context
