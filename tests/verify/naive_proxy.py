"""A proxy that gets it wrong: it sends everything to one engine, and finishes what its client has abandoned.

python tests/verify/naive_proxy.py DECODE_URL [PREFILL_URL]     (the engines' key in PDSERVE_ENGINE_KEY)

With a prefill it also makes prefill legs, whose transfers no decode knows.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import uuid
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[2])

import httpx  # noqa: E402

from tests.fakes.microhttp import Request, Responder, serve  # noqa: E402


class NaiveProxy:
    def __init__(self, upstream: str, prefill: str | None = None) -> None:
        self._prefill = prefill
        key = {"Authorization": f"Bearer {os.environ['PDSERVE_ENGINE_KEY']}"}
        self._client = httpx.AsyncClient(base_url=upstream, headers=key, trust_env=False, timeout=60)
        self._pumps: set[asyncio.Task[None]] = set()

    async def handle(self, request: Request, responder: Responder) -> None:
        if request.path == "/ready":
            await responder.send(200, {})
            return
        if self._prefill and request.method == "POST":
            await self._lose(f"{self._prefill}{request.path}", json.loads(request.body))
        chunks: asyncio.Queue[bytes | None] = asyncio.Queue()
        pump = asyncio.create_task(self._pump(request, chunks))
        self._pumps.add(pump)
        pump.add_done_callback(self._pumps.discard)
        first = await chunks.get()
        assert first is not None
        await responder.open_stream(first.decode())
        while (chunk := await chunks.get()) is not None:
            await responder.chunk(chunk)
        await responder.close_stream()

    async def _lose(self, url: str, body: dict[str, object]) -> None:
        params = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": uuid.uuid4().hex}
        leg = body | {"max_tokens": 1, "stream": False, "kv_transfer_params": params}
        (await self._client.post(url, json=leg)).raise_for_status()

    async def _pump(self, request: Request, chunks: asyncio.Queue[bytes | None]) -> None:
        """The upstream's content type, its body, None."""
        async with self._client.stream(request.method, request.path, content=request.body) as response:
            chunks.put_nowait(response.headers["content-type"].encode())
            async for chunk in response.aiter_bytes():
                chunks.put_nowait(chunk)
        chunks.put_nowait(None)


async def main() -> None:
    server = await serve("127.0.0.1", 0, NaiveProxy(*sys.argv[1:]).handle)
    host, port = server.sockets[0].getsockname()
    print(f"serving on http://{host}:{port}", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
