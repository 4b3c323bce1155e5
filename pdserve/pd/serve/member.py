"""One process of the proxy: what clients talk to.

The application here answers what is not relayed: health, lists, figures. Relayed requests go past it (serve.gateway).
Only processes that serve import this module: their parent stays small without it.
"""

from __future__ import annotations

import asyncio
import gc
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from pdserve.errors import PdserveError, RecipeError
from pdserve.pd.config.proxy import ProxyConfig
from pdserve.pd.errors import ApiError, no_route
from pdserve.pd.file_reads import read_regular
from pdserve.pd.http.front import Front
from pdserve.pd.processes.heartbeat import Beats
from pdserve.pd.processes.shared_numbers import Numbers
from pdserve.pd.processes.shared_pages import Pages
from pdserve.pd.requests.dialects import nearest_dialect
from pdserve.pd.serve import allocator, control, server
from pdserve.pd.serve.gateway import Gateway
from pdserve.pd.serve.intake import WITHOUT_KEY
from pdserve.pd.workers.models import engine_version
from pdserve.pd.workers.registry import RETRY_AFTER_SECONDS

FRESH_A_SECOND = 20
"""Each made anew; who asks more often gets the last one."""


class PageLimit:
    def __init__(self, make: Callable[[], bytes], clock: Callable[[], float] = time.monotonic) -> None:
        self._make, self._clock = make, clock
        self._page = b""
        self._second, self._made = 0, FRESH_A_SECOND

    def page(self) -> bytes:
        second = int(self._clock())
        if second != self._second:
            self._second, self._made = second, 0
        if self._made < FRESH_A_SECOND:
            self._made += 1
            self._page = self._make()
        return self._page


_LATER = {"retry-after": str(RETRY_AFTER_SECONDS)}


def create_app() -> Starlette:
    """Return the routes that are not relayed. `app.state.gateway` must be set before the first request. FastAPI, which
    the admin's routes have, would take 7 MB more in each process for models that nothing here needs."""
    handlers = {ApiError: _api_error, HTTPException: _http_error}
    app = Starlette(exception_handlers=handlers)  # type: ignore[arg-type]  # each gets its own class
    figures = PageLimit(lambda: app.state.gateway.page())  # noqa: PLW0108  (it is set later)

    async def health(_: Request) -> Response:
        """Answer that this process lives. `generation` grows with each rolling restart."""
        body = {"status": "alive", "generation": app.state.generation}
        refused: str = app.state.gateway.not_restarted
        return JSONResponse(body | {"not_restarted": refused} if refused else body)

    async def ready(_: Request) -> Response:
        """Answer whether requests can be served: every pool has a ready worker."""
        ok, body = app.state.gateway.readiness()
        return JSONResponse(body, status_code=200 if ok else 503, headers=None if ok else _LATER)

    async def workers(_: Request) -> Response:
        """Answer what each worker has to do, over all processes but those that are being replaced (`retiring`)."""
        gateway: Gateway = app.state.gateway
        return JSONResponse({"workers": gateway.readiness()[1]["workers"], "retiring": gateway.retiring})

    async def metrics(_: Request) -> Response:
        return Response(figures.page(), headers={"content-type": CONTENT_TYPE_LATEST})

    async def ping(_: Request) -> Response:
        """Answer SageMaker's health check: the deployment answers as an engine that can serve would."""
        ok = app.state.gateway.readiness()[0]
        return Response(status_code=200 if ok else 503, headers=None if ok else _LATER)

    async def load(_: Request) -> Response:
        """Answer the load of the deployment, as an engine reports its own."""
        return JSONResponse({"server_load": app.state.gateway.load()})

    async def version(_: Request) -> Response:
        """Answer vLLM's version, from the first engine that answers."""
        gateway: Gateway = app.state.gateway
        return JSONResponse(await engine_version(gateway.registry, gateway.engines))

    async def list_models(_: Request) -> Response:
        gateway: Gateway = app.state.gateway
        return JSONResponse(await gateway.models.listed())

    async def canary(request: Request) -> Response:
        """Send one token through the pair that the launcher names."""
        authorization = request.headers.get("authorization", "")
        await app.state.gateway.send_canary(authorization, request.query_params)
        return JSONResponse({"status": "answered"})

    for path, answer, methods in (
        ("/health", health, {"GET"}),
        ("/ready", ready, {"GET"}),
        ("/workers", workers, {"GET"}),
        ("/metrics", metrics, {"GET"}),
        ("/ping", ping, {"GET", "POST"}),
        ("/load", load, {"GET"}),
        ("/version", version, {"GET"}),
        ("/v1/models", list_models, {"GET"}),
        ("/canary", canary, {"POST"}),
    ):
        route = Route(path, answer)
        # An engine knows no HEAD.
        route.methods = methods
        app.router.routes.append(route)
    return app


async def _api_error(request: Request, error: ApiError) -> Response:
    return _answer_of(error, request, error.headers())


async def _http_error(request: Request, error: HTTPException) -> Response:
    missing = error.status_code == 404
    answer = no_route(request.url.path) if missing else ApiError(error.status_code, str(error.detail))
    return _answer_of(answer, request, dict(error.headers or {}))


def _answer_of(error: ApiError, request: Request, headers: dict[str, str]) -> Response:
    body = nearest_dialect(request.url.path.encode()).error_body(error)
    return Response(body, status_code=error.status, headers=headers, media_type="application/json")


def load_config(path: Path, read: Callable[[Path], bytes] = Path.read_bytes) -> ProxyConfig:
    """Read the proxy's configuration. Raises RecipeError when the file cannot be read, or describes what this proxy
    cannot do."""
    try:
        return parse_config(read(path), path)
    except OSError as error:
        raise RecipeError(f"cannot read the proxy's configuration: {error}", where=str(path)) from error


def parse_config(text: bytes, path: Path) -> ProxyConfig:
    """Parse the proxy's configuration. `path`: where the text stands. Raises RecipeError when it describes what this
    proxy cannot do."""
    try:
        config = ProxyConfig.model_validate_json(text)
    except ValidationError as error:
        raise RecipeError(f"cannot read the proxy's configuration: {error}", where=str(path)) from error
    for worker in config.workers:
        if lack := config.lack_of(worker):
            raise RecipeError(lack, where=str(path))
    return config


@dataclass(frozen=True)
class MemberContext:
    """The things that one process of the proxy shares with the others."""

    numbers: Numbers
    sock: socket.socket
    """The listening socket, which the parent has too."""
    control: IO[bytes]
    """Where control lines come from."""
    with_states: bool
    """Worker states are among them; else all workers are ready from the start."""
    pages: Pages | None
    notify: Callable[[dict[str, Any]], None]
    beats: Beats
    generation: int
    succeeds: bool
    """The processes of the generation before still serve."""


async def run(path: Path, config: ProxyConfig, key: str | None, place: MemberContext) -> None:
    """Run one process of the proxy until a signal ends it. `path`: of the configuration, read again on SIGHUP. Raises
    StartError when an address cannot be had."""
    app = create_app()
    gateway = Gateway(
        config,
        key,
        place.numbers,
        app,
        lambda: load_config(path, read_regular),
        pages=place.pages,
        notify=place.notify,
        succeeds=place.succeeds,
    )
    app.state.gateway, app.state.generation = gateway, place.generation
    # What is there now stays: the collector need not look at it again and again.
    gc.freeze()
    place.beats.keep(place.numbers.process, asyncio.get_running_loop())
    if not place.with_states:
        gateway.registry.set_all_ready()
    told = asyncio.Event()
    listener = asyncio.ensure_future(control.listen(gateway, place.control, told))
    headers = None if gateway.cors is None else gateway.cors.headers
    front = Front(gateway, server.front_limits(config), WITHOUT_KEY, headers)
    gateway.metrics.read_gauges_from(lambda: [("connections", (), len(front.connections))])
    try:
        await server.ProxyServer(
            config,
            front,
            gateway,
            place.sock,
            told,
            serving=lambda: place.notify({"serving": True}),
            leaving=lambda: place.notify({"leaving": True}),
        ).run()
    finally:
        listener.cancel()


def serve(path: Path, config: ProxyConfig, key: str | None, place: MemberContext) -> int:
    """Do `run` in an event loop of its own, and return the exit code."""
    allocator.keep_for_bodies()
    try:
        with asyncio.Runner(loop_factory=server.new_loop) as runner:
            runner.run(run(path, config, key, place))
    except PdserveError as error:
        print(error.render(), file=sys.stderr, flush=True)
        return error.exit_code
    return 0
