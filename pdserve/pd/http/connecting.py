"""A new connection, with a limit of time. By itself because it waits: what waits is never compiled (hatch_build.py)."""

from __future__ import annotations

import asyncio
import errno
import ssl
from collections.abc import Callable
from typing import TypeVar

C = TypeVar("C", bound=asyncio.BaseProtocol)


def lacks_descriptors(error: OSError) -> bool:
    """Whether a connection could not be made because this process, or its machine, has no descriptor left."""
    return error.errno in (errno.EMFILE, errno.ENFILE)


async def connect(protocol: Callable[[], C], host: str, port: int, *, tls: ssl.SSLContext | None, timeout: float) -> C:
    """`timeout`: seconds. Raises OSError, TimeoutError and TLS errors among them."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(timeout):
        _, connected = await loop.create_connection(
            protocol, host, port, ssl=tls, server_hostname=host if tls is not None else None
        )
    return connected
