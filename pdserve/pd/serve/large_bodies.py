"""Large request bodies: put together in a thread, and read in steps between which other requests have a turn."""

from __future__ import annotations

import asyncio

from pdserve.pd.http.incoming import Request
from pdserve.pd.relay.client import Client
from pdserve.pd.requests.body import Body
from pdserve.pd.requests.encodings import as_utf8
from pdserve.pd.requests.scan import Scan


class LargeBodies:
    """Reads large bodies. Several take turns: there is never more than one step in a turn of the event loop."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()

    async def read(self, request: Request, client: Client) -> Body:
        """Put a large body together and read it in steps. Raises ApiError 400 when it is no JSON object that an engine
        may get; ClientGoneError, or what else ends the request."""
        parts, request.parts = request.parts, []
        parts[0] = as_utf8(parts[0], whole=len(parts) == 1)
        async with self._turn:
            raw = parts[0]
            if len(parts) > 1:
                # This copies without holding up other threads.
                raw = await asyncio.to_thread(b"".join, parts)
        del parts[:]
        request.parts = [raw]
        scan = Scan(raw)
        done = False
        while not done:
            if client.interruption is not None:
                raise client.interruption
            async with self._turn:
                done = scan.step()
                await asyncio.sleep(0)
        return Body(raw, scan)
