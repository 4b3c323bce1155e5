"""A new connection, with a limit of time. By itself, for `async with` is not compiled (hatch_build.py)."""

from __future__ import annotations

import asyncio
import errno
import ssl
from collections.abc import Callable
from typing import Protocol, TypeVar, cast

from pdserve.time_limit import time_limit


class StreamProtocol(Protocol):
    """Name what an event loop calls on a connection: asyncio.Protocol by its methods. Our connections are no subclasses
    of it, because a class with an interpreted base is not compiled: each attribute is then looked up by its name."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None: ...

    def data_received(self, data: bytes) -> None: ...

    def eof_received(self) -> bool | None: ...

    def pause_writing(self) -> None: ...

    def resume_writing(self) -> None: ...

    def connection_lost(self, exc: Exception | None) -> None: ...


C = TypeVar("C", bound=StreamProtocol)


def factory(make: Callable[[], C]) -> Callable[[], asyncio.Protocol]:
    """`make` for an event loop. asyncio and uvloop ask only whether a protocol is a BufferedProtocol."""
    return cast("Callable[[], asyncio.Protocol]", make)


def lacks_descriptors(error: OSError) -> bool:
    """Return whether a connection could not be made because this process, or its machine, has no descriptor left."""
    return error.errno in (errno.EMFILE, errno.ENFILE)


async def connect(make: Callable[[], C], host: str, port: int, *, tls: ssl.SSLContext | None, timeout: float) -> C:
    """`timeout`: seconds. Raises OSError, TimeoutError and TLS errors among them."""
    loop = asyncio.get_running_loop()
    async with time_limit(timeout):
        _, connected = await loop.create_connection(
            factory(make), host, port, ssl=tls, server_hostname=host if tls is not None else None
        )
    return cast("C", connected)
