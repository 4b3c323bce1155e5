"""The relay that everybody writes first: a FastAPI route, httpx to both workers, chunks through a generator.

    python -m benchmarks.proxy.toy PORT PREFILL_URLS DECODE_URLS BOOTSTRAP_URLS       (comma-separated)

Kinder than most of its kind: it keeps its connections, and notices when prefill has failed.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse


def create_app(prefill_urls: str, decode_urls: str, bootstrap_urls: str) -> FastAPI:
    engine_ids: list[str] = []
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)

    def clients(urls: str) -> list[httpx.AsyncClient]:
        return [httpx.AsyncClient(base_url=url, timeout=None, limits=limits) for url in urls.split(",")]  # noqa: S113

    prefills, decodes, bootstraps = clients(prefill_urls), clients(decode_urls), bootstrap_urls.split(",")
    turns = itertools.count()

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with httpx.AsyncClient() as client:
            for url in bootstraps:
                engine_ids.append((await client.get(f"{url}/query")).json()["0"]["engine_id"])
        yield
        for worker in prefills + decodes:
            await worker.aclose()

    app = FastAPI(lifespan=lifespan)

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        body: dict[str, Any] = await request.json()
        transfer_id = uuid.uuid4().hex
        turn = next(turns) % len(prefills)
        prefill, decode = prefills[turn], decodes[turn]
        first = {**body, "max_tokens": 1, "stream": False}
        first["kv_transfer_params"] = {"do_remote_decode": True, "transfer_id": transfer_id}
        body["kv_transfer_params"] = {
            "do_remote_prefill": True,
            "transfer_id": transfer_id,
            "remote_bootstrap_addr": bootstraps[turn],
            "remote_engine_id": engine_ids[turn],
        }
        leg = asyncio.create_task(prefill.post("/v1/chat/completions", json=first))
        if not body.get("stream"):
            answer = await decode.post("/v1/chat/completions", json=body)
            (await leg).raise_for_status()
            return JSONResponse(answer.json(), answer.status_code)

        async def relay() -> AsyncIterator[bytes]:
            async with decode.stream("POST", "/v1/chat/completions", json=body) as stream:
                async for chunk in stream.aiter_bytes():
                    yield chunk
            (await leg).raise_for_status()

        return StreamingResponse(relay(), media_type="text/event-stream")

    return app


if __name__ == "__main__":
    uvicorn.run(
        create_app(*sys.argv[2:5]), host="127.0.0.1", port=int(sys.argv[1]), log_level="warning", access_log=False
    )
