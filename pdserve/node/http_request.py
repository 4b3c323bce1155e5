"""HTTP requests that an agent makes on its node for the launcher."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from pdserve.reach.protocol import Answered, Ask
from pdserve.reach.proxy_tls import unverified

if TYPE_CHECKING:
    import httpx

_MOST_BYTES = 4 * 1024 * 1024
"""Of an answer: an order or event must fit a line. LMCache's /status and an engine's /metrics are far below."""


class NodeHttp:
    """One client for all requests, made with the first one."""

    def __init__(self) -> None:
        self._client: httpx.AsyncClient | None = None

    async def answer(self, ask: Ask) -> Answered:
        """Makes the request; never raises for what comes of it."""
        import httpx

        if ask.method == "CONNECT":
            return await _connected(ask)
        if self._client is None:
            # trust_env off: a proxy variable of the site must not stand between us and loopback.
            self._client = httpx.AsyncClient(trust_env=False, verify=unverified())
        headers = dict(ask.headers)
        if ask.body is not None:
            headers["Content-Type"] = "application/json"
        try:
            async with asyncio.timeout(ask.seconds):
                response = await self._client.request(
                    ask.method, ask.url, headers=headers, content=ask.body, timeout=ask.seconds
                )
        except TimeoutError:
            return Answered(id=ask.id, status=None, error=f"no answer within {ask.seconds:g} s")
        except httpx.HTTPError as error:
            why = f"{type(error).__name__}: {error}"
            return Answered(id=ask.id, status=None, error=why, refused=isinstance(error, httpx.ConnectError))
        if len(response.content) > _MOST_BYTES:
            return Answered(id=ask.id, status=None, error=f"an answer of {len(response.content)} bytes is too long")
        return Answered(id=ask.id, status=response.status_code, body=response.text)

    async def close(self) -> None:
        """Closes the connections."""
        if self._client is not None:
            await self._client.aclose()


async def _connected(ask: Ask) -> Answered:
    url = urlsplit(ask.url)
    try:
        async with asyncio.timeout(ask.seconds):
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
