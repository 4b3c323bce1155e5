"""One process of the proxy: what clients talk to.

The application here answers what is not relayed: health, lists, figures. Relayed requests go past it (pd.gateway).
Only processes that serve import this module: their parent stays small without it.
"""

from __future__ import annotations

import asyncio
import gc
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from pdserve.errors import PdserveError, RecipeError
from pdserve.pd import control, server
from pdserve.pd.beats import Beats
from pdserve.pd.config import ProxyConfig
from pdserve.pd.errors import ApiError, no_route
from pdserve.pd.gateway import WITHOUT_KEY, Gateway
from pdserve.pd.http.front import Front
from pdserve.pd.models import engine_version
from pdserve.pd.registry import RETRY_AFTER_SECONDS
from pdserve.pd.shared_numbers import Numbers
from pdserve.pd.shared_pages import Pages

_LATER = {"retry-after": str(RETRY_AFTER_SECONDS)}


def create_app() -> FastAPI:
    """The routes that are not relayed. `app.state.gateway` must be set before the first request."""
    app = FastAPI(title="pdserve proxy", docs_url=None, redoc_url=None, openapi_url=None)

    @app.get("/health")
    async def health() -> dict[str, str | int]:
        """This process lives. `generation` grows with each rolling restart."""
        said = {"status": "alive", "generation": app.state.generation}
        refused: str = app.state.gateway.not_restarted
        return said | {"not_restarted": refused} if refused else said

    @app.get("/ready")
    async def ready() -> JSONResponse:
        """Requests can be served: every pool has a ready worker."""
        ok, body = app.state.gateway.readiness()
        return JSONResponse(body, status_code=200 if ok else 503, headers=None if ok else _LATER)

    @app.get("/workers")
    async def workers() -> dict[str, Any]:
        return {"workers": app.state.gateway.readiness()[1]["workers"]}

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(app.state.gateway.page(), media_type=CONTENT_TYPE_LATEST)

    @app.post("/ping")
    @app.get("/ping")
    async def ping() -> Response:
        """What SageMaker asks: as an engine says that it can serve, the deployment does."""
        ok = app.state.gateway.readiness()[0]
        return Response(status_code=200 if ok else 503, headers=None if ok else _LATER)

    @app.get("/load")
    async def load() -> dict[str, int]:
        """Of the deployment, as an engine says it of itself."""
        return {"server_load": app.state.gateway.load()}

    @app.get("/version")
    async def version() -> JSONResponse:
        """vLLM's, from the first engine that answers."""
        gateway: Gateway = app.state.gateway
        return JSONResponse(await engine_version(gateway.registry, gateway.engines))

    @app.get("/v1/models")
    async def list_models() -> dict[str, Any]:
        gateway: Gateway = app.state.gateway
        return await gateway.models.listed()

    @app.exception_handler(ApiError)
    async def api_error(_: Request, error: ApiError) -> JSONResponse:
        return JSONResponse(error.body(), status_code=error.status, headers=error.headers())

    _answer_errors_in_openai_shape(app)
    return app


def _answer_errors_in_openai_shape(app: FastAPI) -> None:
    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> JSONResponse:
        missing = error.status_code == 404
        answer = no_route(request.url.path) if missing else ApiError(error.status_code, str(error.detail))
        return JSONResponse(answer.body(), status_code=answer.status, headers=dict(error.headers or {}))


def load_config(path: Path) -> ProxyConfig:
    """RecipeError: the file cannot be read, or describes what this proxy cannot do."""
    try:
        return parse_config(path.read_bytes(), path)
    except OSError as error:
        raise RecipeError(f"cannot read the proxy's configuration: {error}", where=str(path)) from error


def parse_config(text: bytes, path: Path) -> ProxyConfig:
    """`path`: where it stands. RecipeError: it describes what this proxy cannot do."""
    try:
        config = ProxyConfig.model_validate_json(text)
    except ValidationError as error:
        raise RecipeError(f"cannot read the proxy's configuration: {error}", where=str(path)) from error
    for worker in config.workers:
        if config.protocol == "mooncake" and worker.role == "prefill" and not worker.bootstrap_url:
            raise RecipeError(f"{worker.name} has no bootstrap_url, which Mooncake needs", where=str(path))
    return config


@dataclass(frozen=True)
class Place:
    """What one process of the proxy shares with the others."""

    numbers: Numbers
    sock: socket.socket
    """The listening socket, which the parent has too."""
    control: IO[bytes] | None
    """Where control lines come from."""
    with_states: bool
    """Worker states are among them; else all workers are ready from the start."""
    pages: Pages | None
    tell: Callable[[dict[str, Any]], None]
    beats: Beats
    generation: int
    succeeds: bool
    """The processes of the generation before still serve."""


async def run(path: Path, config: ProxyConfig, key: str | None, place: Place) -> None:
    """One process; serves until a signal ends it. `path`: of the configuration, read again on SIGHUP. StartError: an
    address cannot be had."""
    app = create_app()
    gateway = Gateway(
        config,
        key,
        place.numbers,
        app,
        lambda: load_config(path),
        pages=place.pages,
        tell=place.tell,
        succeeds=place.succeeds,
    )
    app.state.gateway, app.state.generation = gateway, place.generation
    # What is there now stays: the collector need not look at it again and again.
    gc.freeze()
    place.beats.keep(place.numbers.process, asyncio.get_running_loop())
    if not place.with_states:
        gateway.registry.set_all_ready()
    listener = None if place.control is None else asyncio.ensure_future(control.listen(gateway, place.control))
    front = Front(gateway, server.front_limits(config), WITHOUT_KEY)
    try:
        await server.Server(config, front, gateway, place.sock, lambda: place.tell({"serving": True})).run()
    finally:
        if listener is not None:
            listener.cancel()


def serve(path: Path, config: ProxyConfig, key: str | None, place: Place) -> int:
    """`run` in an event loop of its own; the exit code."""
    try:
        with asyncio.Runner(loop_factory=server.new_loop) as runner:
            runner.run(run(path, config, key, place))
    except PdserveError as error:
        print(error.render(), file=sys.stderr, flush=True)
        return error.exit_code
    return 0
