"""Makes HTTP requests on a node for the launcher. Apart from the agent, which only passes orders on."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from pdserve.health import unverified_tls
from pdserve.reach.protocol import Answered, Ask
from pdserve.time_limit import time_limit

if TYPE_CHECKING:
    import httpcore

_MOST_CONNECTIONS = 100
"""Requests to engines that hang must not keep the others waiting."""
_IDLE_SECONDS = 5.0
_MOST_BYTES = 4 * 1024 * 1024
"""Of an answer: an order or event must fit a line. LMCache's /status and an engine's /metrics are far below."""


class NodeHttp:
    """One client for all requests, made with the first one."""

    def __init__(self) -> None:
        self._connections: httpcore.AsyncConnectionPool | None = None

    async def answer(self, ask: Ask) -> Answered:
        """Makes the request; never raises for what comes of it."""
        import httpcore  # httpx, which stands on it, takes three times as long to import

        if ask.method == "CONNECT":
            return await _request(ask)
        if self._connections is None:
            self._connections = httpcore.AsyncConnectionPool(
                ssl_context=unverified_tls(), max_connections=_MOST_CONNECTIONS, keepalive_expiry=_IDLE_SECONDS
            )
        headers: list[tuple[str | bytes, str | bytes]] = [*ask.headers.items()]
        body = None if ask.body is None else ask.body.encode()
        if body is not None:
            headers.append(("Content-Type", "application/json"))
        try:
            async with time_limit(ask.seconds):
                response = await self._connections.request(ask.method, ask.url, headers=headers, content=body)
        except TimeoutError:
            return Answered(id=ask.id, status=None, error=f"no answer within {ask.seconds:g} s")
        except (
            httpcore.NetworkError,
            httpcore.ProtocolError,
            httpcore.UnsupportedProtocol,
            httpcore.TimeoutException,
            OSError,
            ValueError,
        ) as error:
            why = f"{type(error).__name__}: {error}"
            return Answered(id=ask.id, status=None, error=why, refused=isinstance(error, httpcore.ConnectError))
        if len(response.content) > _MOST_BYTES:
            return Answered(id=ask.id, status=None, error=f"an answer of {len(response.content)} bytes is too long")
        return Answered(id=ask.id, status=response.status, body=response.content.decode(errors="replace"))

    async def close(self) -> None:
        """Closes the connections."""
        if self._connections is not None:
            await self._connections.aclose()


async def _request(ask: Ask) -> Answered:
    url = urlsplit(ask.url)
    try:
        async with time_limit(ask.seconds):
            _, writer = await asyncio.open_connection(url.hostname, url.port)
    except TimeoutError:
        return Answered(id=ask.id, status=None, error=f"no answer within {ask.seconds:g} s")
    except OSError as error:
        why = error.strerror or str(error)
        return Answered(id=ask.id, status=None, error=why, refused=isinstance(error, ConnectionRefusedError))
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return Answered(id=ask.id, status=200)
