"""The prefill/decode proxy: what clients talk to.

    python -m pdserve.proxy --config proxy.json [--no-control]

The configuration is pd.config.ProxyConfig as JSON; PDSERVE_ENGINE_KEY is the bearer token of the engines. Worker states
come as JSON lines on stdin (pd.control), unless --no-control is given or stdin is no pipe: then all workers count as
ready. Ends itself only on SIGTERM or SIGINT, after running requests have had `drain_seconds` to finish. SIGHUP reads
keys, policies and limits again. SIGUSR2 is a rolling restart, which refuses no connection (pd.processes).

The application here answers what is not relayed: health, lists, figures. Relayed requests go past it (pd.gateway).
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import os
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

from pdserve import __version__, compiled
from pdserve.errors import PdserveError, RecipeError, StartError
from pdserve.pd import control, server, shared_numbers, succession
from pdserve.pd.beats import Beats
from pdserve.pd.config import ProxyConfig
from pdserve.pd.errors import ApiError, no_route
from pdserve.pd.gateway import Gateway
from pdserve.pd.http.front import Front
from pdserve.pd.models import engine_version
from pdserve.pd.processes import Processes, line_of
from pdserve.pd.registry import RETRY_AFTER_SECONDS
from pdserve.pd.shared_numbers import Numbers
from pdserve.pd.shared_pages import Pages

log = logging.getLogger("pdserve.proxy")

ENGINE_KEY = "PDSERVE_ENGINE_KEY"
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
        config = ProxyConfig.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
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


def bound(config: ProxyConfig, *, shared: bool) -> socket.socket:
    """The socket that clients connect to. StartError: the address cannot be had."""
    try:
        return server.listening(config, shared=shared)
    except OSError as error:
        raise StartError(
            f"error while attempting to bind on address ({config.host!r}, {config.port}): "
            f"{(error.strerror or str(error)).lower()}",
            where="proxy",
            todo="see who has the port (ss -ltnp), or give the proxy another one: ports.proxy",
        ) from error


def listening(config: ProxyConfig) -> list[socket.socket]:
    """One socket for each process. StartError: the address cannot be had."""
    # Members share the port with everybody who asks so: that nobody else has it is seen here.
    alone = bound(config, shared=False)
    if config.processes == 1:
        found = [alone]
    else:
        with alone:
            config = config.model_copy(update={"port": alone.getsockname()[1]})
        found = [bound(config, shared=True) for _ in range(config.processes)]
    for sock in found:
        # From here on nobody is refused, whichever of the processes is there.
        sock.listen(server.BACKLOG)
    return found


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
    place.beats.keep(place.numbers.process)
    if not place.with_states:
        gateway.registry.set_all_ready()
    listener = None if place.control is None else asyncio.ensure_future(control.listen(gateway, place.control))
    front = Front(gateway, server.front_limits(config))
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


def serve_together(path: Path, config: ProxyConfig, key: str | None, *, with_control: bool) -> int:
    """`config.processes` processes on one port; the exit code. StartError: the address cannot be had."""
    inherited = succession.taken()
    if inherited is None:
        sockets = listening(config)
    else:
        sockets = [socket.socket(fileno=descriptor) for descriptor in inherited.sockets]
    count = len(sockets)
    if count != config.processes:
        log.warning("it stays at %d process(es): another number takes a restart of the deployment's proxy", count)
        config = config.model_copy(update={"processes": count})
    generation = 1 if inherited is None else inherited.generation + 1
    shared = Path(f"/proc/self/fd/{os.memfd_create('pdserve-proxy', 0)}")
    files = Pages.create(count)
    signs = Beats.create(count)
    processes: Processes

    def member(index: int, lines: int, asks: int) -> int:
        def tell(message: dict[str, Any]) -> None:
            os.write(asks, line_of(message))

        size = Gateway.numbers(config)
        # Who reads it closes it.
        source = os.fdopen(lines, "rb", closefd=False)
        place = Place(
            numbers=shared_numbers.private(size)
            if count == 1
            else shared_numbers.shared(shared, size, process=index, processes=count),
            sock=sockets[index],
            control=source,
            with_states=with_control,
            pages=None if count == 1 else Pages(files, index),
            tell=tell,
            beats=signs,
            generation=generation,
            succeeds=processes.rolling,
        )
        return serve(path, config, key, place)

    def configure(text: str) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        except OSError as error:
            log.warning("the configuration cannot be written to %s: %s", path, error)

    processes = Processes(
        count,
        member,
        sys.stdin.fileno() if with_control else None,
        beats=signs,
        sockets=[sock.fileno() for sock in sockets],
        inherited=inherited,
        configure=configure,
    )
    return processes.run()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m pdserve.proxy", description="Prefill/decode proxy for vLLM.")
    parser.add_argument("--config", type=Path, required=True, help="ProxyConfig as JSON")
    parser.add_argument("--no-control", action="store_true", help="all workers are ready from the start")
    parser.add_argument(succession.CHECK, action="store_true", help="only say whether it could start")
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    log.info("pdserve %s, %s", __version__, compiled.how())
    with_control = not args.no_control and control.stdin_is_control()
    key = os.environ.get(ENGINE_KEY)
    try:
        config = load_config(args.config)
    except PdserveError as error:
        print(error.render(), file=sys.stderr)
        return error.exit_code
    if args.check:
        return 0
    try:
        return serve_together(args.config, config, key, with_control=with_control)
    except PdserveError as error:
        print(error.render(), file=sys.stderr, flush=True)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
