"""The prefill/decode proxy: what clients talk to.

    python -m pdserve.proxy --config proxy.json [--no-control]

The configuration is pd.config.ProxyConfig as JSON; PDSERVE_ENGINE_KEY is the bearer token of the engines. Worker states
come as JSON lines on stdin (pd.control), unless --no-control is given or stdin is no pipe: then all workers count as
ready. Ends itself only on SIGTERM or SIGINT, after running requests have had `drain_seconds` to finish.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import re
import sys
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, Protocol

import httpx
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from pdserve.errors import PdserveError, RecipeError
from pdserve.pd import control
from pdserve.pd.aggregated import Aggregated
from pdserve.pd.config import ProxyConfig
from pdserve.pd.errors import ApiError
from pdserve.pd.mooncake import Mooncake
from pdserve.pd.registry import RETRY_AFTER_SECONDS, Registry
from pdserve.pd.relay import Client, Exchange, Upstream
from pdserve.pd.requests import PATHS, ClientRequest, Kind, check, check_disaggregated, parse
from pdserve.pd.server import Server

log = logging.getLogger("pdserve.proxy")

ENGINE_KEY = "PDSERVE_ENGINE_KEY"
REQUEST_ID = re.compile(r"[\x21-\x7e]{1,256}")
PASSED_ON = ("traceparent", "tracestate")
"""The only headers of a client that reach an engine. Authorization is the deployment's, ranks are ours to choose."""


class PdProtocol(Protocol):
    """How a request reaches the engines."""

    async def serve(self, request: ClientRequest, client: Client) -> None: ...

    async def drained(self) -> None: ...


class Proxy:
    """The state behind the routes. Made by the application's lifespan, because it needs the event loop."""

    def __init__(self, config: ProxyConfig, key: str | None) -> None:
        self.config = config
        self.draining = False
        self.drain_until = 0.0
        """Loop time at which whatever is still running is cut."""
        self.registry = Registry(config)
        self.upstream = Upstream(key, config.connect_timeout_seconds)
        self.protocol: PdProtocol = (
            Aggregated(self.registry, self.upstream)
            if config.protocol == "aggregated"
            else Mooncake(self.registry, self.upstream)
        )
        self._clients: set[Client] = set()

    async def respond(self, kind: Kind, request: Request) -> Exchange:
        """Read and check a request. What goes wrong later is answered by the Exchange."""
        request_id = request.headers.get("x-request-id", "")
        if not REQUEST_ID.fullmatch(request_id):
            request_id = uuid.uuid4().hex
        headers = {name: value for name in PASSED_ON if (value := request.headers.get(name))}
        headers["x-request-id"] = request_id
        try:
            raw = await self._read(request)
        except ApiError as error:
            return Exchange(request_id, raising(error))

        async def run(client: Client) -> None:
            body = parse(raw)
            check(kind, body)
            if self.config.protocol != "aggregated":
                check_disaggregated(kind, body)
            limit = ApiError(504, "The request took longer than this deployment allows.")
            timer = asyncio.get_running_loop().call_later(self.config.request_timeout_seconds, client.interrupt, limit)
            self._clients.add(client)
            try:
                await self.protocol.serve(ClientRequest(kind, body, request_id, headers), client)
            finally:
                timer.cancel()
                self._clients.discard(client)

        return Exchange(request_id, run)

    async def models(self) -> Response:
        """The list of a ready engine, or what the configuration says while there is none."""
        for worker in [worker for role in reversed(self.registry.roles) for worker in self.registry.ready(role)]:
            with contextlib.suppress(httpx.HTTPError):
                answer = await self.upstream.get(f"{worker.config.url}/v1/models", key=True)
                if answer.status_code == 200:
                    return Response(answer.content, media_type="application/json")
        card = {"id": self.config.served_name, "object": "model", "created": 0, "owned_by": "pdserve"}
        return JSONResponse({"object": "list", "data": [card]})

    def readiness(self) -> tuple[bool, dict[str, Any]]:
        empty = self.registry.empty_pools()
        ready = not empty and not self.draining
        return ready, {
            "ready": ready,
            "draining": self.draining,
            "empty_pools": empty,
            "workers": [worker.describe() for worker in self.registry.workers.values()],
        }

    async def drain(self) -> None:
        """Let running requests finish for `drain_seconds`, then end those that are left with an error."""
        self.draining = True
        self.drain_until = asyncio.get_running_loop().time() + self.config.drain_seconds
        limit = ApiError(503, "The proxy is shutting down.", retry_after=RETRY_AFTER_SECONDS)
        await asyncio.sleep(self.config.drain_seconds)
        for client in list(self._clients):
            client.interrupt(limit)

    async def _read(self, request: Request) -> bytes:
        limit = self.config.max_body_bytes
        too_large = ApiError(413, f"The request body is larger than {limit} bytes.")
        length = request.headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > limit:
            raise too_large
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > limit:
                raise too_large
        return bytes(body)


def raising(error: ApiError) -> Callable[[Client], Awaitable[None]]:
    """The run of an Exchange that can only answer this."""

    async def run(_: Client) -> None:
        raise error

    return run


def create_app(config: ProxyConfig, *, key: str | None, with_control: bool) -> FastAPI:
    """The application. `with_control`: worker states come on stdin."""

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        proxy = Proxy(config, key)
        app.state.proxy = proxy
        listener = asyncio.ensure_future(control.listen(proxy.registry)) if with_control else None
        if listener is None:
            proxy.registry.set_all_ready()
        try:
            yield
        finally:
            if listener is not None:
                listener.cancel()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(proxy.drain_until):
                    await proxy.protocol.drained()
            await proxy.upstream.close()

    app = FastAPI(title="pdserve proxy", lifespan=lifespan, docs_url=None, redoc_url=None)

    @app.get("/health")
    async def health() -> dict[str, str]:
        """This process lives."""
        return {"status": "alive"}

    @app.get("/ready")
    async def ready() -> JSONResponse:
        """Requests can be served: every pool has a ready worker."""
        ok, body = app.state.proxy.readiness()
        headers = None if ok else {"retry-after": str(RETRY_AFTER_SECONDS)}
        return JSONResponse(body, status_code=200 if ok else 503, headers=headers)

    @app.get("/workers")
    async def workers() -> dict[str, Any]:
        return {"workers": app.state.proxy.readiness()[1]["workers"]}

    @app.get("/v1/models")
    async def models() -> Response:
        proxy: Proxy = app.state.proxy
        return await proxy.models()

    def relayed(kind: Kind) -> Any:
        async def endpoint(request: Request) -> Any:
            proxy: Proxy = request.app.state.proxy
            try:
                return await proxy.respond(kind, request)
            except ClientDisconnect:
                return Response(status_code=499)

        return endpoint

    for kind, path in PATHS.items():
        # Plain routes: FastAPI would parse and copy bodies that are only passed on.
        app.router.add_route(path, relayed(kind), methods=["POST"], include_in_schema=False)
    _answer_errors_in_openai_shape(app)
    return app


def _answer_errors_in_openai_shape(app: FastAPI) -> None:
    def answer(error: ApiError, headers: dict[str, str] | None = None) -> JSONResponse:
        return JSONResponse(error.body(), status_code=error.status, headers={**error.headers(), **(headers or {})})

    @app.exception_handler(ApiError)
    async def api_error(_: Request, error: ApiError) -> JSONResponse:
        return answer(error)

    @app.exception_handler(HTTPException)
    async def http_error(_: Request, error: HTTPException) -> JSONResponse:
        return answer(ApiError(error.status_code, str(error.detail)), dict(error.headers or {}))

    @app.exception_handler(Exception)
    async def bug(_: Request, error: Exception) -> JSONResponse:
        return answer(ApiError(500, f"The proxy failed: {type(error).__name__}"))


def load_config(path: Path) -> ProxyConfig:
    """RecipeError: the file cannot be read, or describes what this proxy cannot do."""
    try:
        config = ProxyConfig.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        raise RecipeError(f"cannot read the proxy's configuration: {error}", where=str(path)) from error
    if config.protocol == "nixl":
        raise RecipeError("this proxy does not speak the NIXL protocol yet", where=str(path))
    for worker in config.workers:
        if config.protocol == "mooncake" and worker.role == "prefill" and not worker.bootstrap_url:
            raise RecipeError(f"{worker.name} has no bootstrap_url, which Mooncake needs", where=str(path))
    return config


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m pdserve.proxy", description="Prefill/decode proxy for vLLM.")
    parser.add_argument("--config", type=Path, required=True, help="ProxyConfig as JSON")
    parser.add_argument("--no-control", action="store_true", help="all workers are ready from the start")
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        config = load_config(args.config)
    except PdserveError as error:
        print(error.render(), file=sys.stderr)
        return error.exit_code
    with_control = not args.no_control and control.stdin_is_control()
    app = create_app(config, key=os.environ.get(ENGINE_KEY), with_control=with_control)

    async def drain() -> None:
        # The lifespan has made it by now.
        await app.state.proxy.drain()

    Server(app, config, drain).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
