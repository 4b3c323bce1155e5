"""The admin endpoints: workers come and go while the proxy serves, keys and policies are read again, and the figures
show each API key.

They are on a port or socket of their own and ask for their own token, never for a client's key.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable
from hashlib import sha256
from typing import Any, Protocol
from urllib.parse import urlsplit

import msgspec
from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST

from pdserve.pd.config.proxy import WorkerConfig
from pdserve.pd.errors import ApiError, bad_request
from pdserve.roles import EngineRole


class Workers(Protocol):
    """The registry's operations for an admin."""

    def describe(self) -> list[dict[str, Any]]:
        """Every worker: name, role, state, load."""

    def add(self, worker: WorkerConfig) -> None:
        """Take it in; it gets requests once its health checks pass. ValueError: the name or the URL is taken, the
        deployment has no such role, or its protocol needs what the worker does not have."""

    def drain(self, name: str) -> None:
        """No new requests; those that run go on. KeyError: there is no such worker."""

    def remove(self, name: str) -> None:
        """Forget it; what still runs there fails over or ends with an error. KeyError: there is no such worker."""


class Reload(Protocol):
    """Reads keys and policies again, without dropping a stream. What was reloaded, or why it was not: `{"keys": "ok"}`.
    What could not be read stays as it was."""

    async def __call__(self) -> dict[str, str]: ...


Figures = Callable[[], bytes]
"""The page for Prometheus, with the series that name API keys: those are not on the clients' port."""


class NewWorker(msgspec.Struct, forbid_unknown_fields=True):
    """The body of POST /workers."""

    name: str
    role: EngineRole
    url: str
    bootstrap_url: str | None = None
    kv_events_url: str | None = None
    kv_replay_url: str | None = None


def app(workers: Workers, reload: Reload, figures: Figures, token: str | None) -> FastAPI:
    """The admin's application, errors in OpenAI's shape."""
    application = FastAPI(title="pdserve proxy admin", docs_url=None, redoc_url=None, openapi_url=None)
    application.include_router(router(workers, reload, figures, token))

    @application.exception_handler(ApiError)
    async def api_error(_: Request, error: ApiError) -> JSONResponse:
        return JSONResponse(error.body(), status_code=error.status, headers=error.headers())

    return application


def router(workers: Workers, reload: Reload, figures: Figures, token: str | None) -> APIRouter:
    """The endpoints. They raise ApiError, for the application to answer. `token`: None asks for none."""
    guarded = APIRouter(dependencies=[Depends(_guard(token))])

    @guarded.get("/workers")
    async def list_workers() -> dict[str, Any]:
        return {"workers": workers.describe()}

    @guarded.post("/workers", status_code=201)
    async def add_worker(request: Request) -> dict[str, Any]:
        worker = _worker(await request.body())
        try:
            workers.add(worker)
        except ValueError as error:
            raise ApiError(409, str(error)) from error
        return {"workers": workers.describe()}

    @guarded.post("/workers/{name}/drain")
    async def drain_worker(name: str) -> dict[str, Any]:
        try:
            workers.drain(name)
        except KeyError:
            raise _unknown(name) from None
        return {"workers": workers.describe()}

    @guarded.delete("/workers/{name}")
    async def remove_worker(name: str) -> dict[str, Any]:
        try:
            workers.remove(name)
        except KeyError:
            raise _unknown(name) from None
        return {"workers": workers.describe()}

    @guarded.post("/reload")
    async def reload_all() -> dict[str, str]:
        return await reload()

    @guarded.get("/metrics")
    async def metrics() -> Response:
        return Response(figures(), media_type=CONTENT_TYPE_LATEST)

    return guarded


def _guard(token: str | None) -> Any:
    # Hashes, because compare_digest reveals the length of texts that differ in it.
    wanted = None if token is None else sha256(token.encode()).digest()

    async def check(request: Request) -> None:
        if wanted is None:
            return
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        digest = sha256(given.strip().encode(errors="surrogateescape")).digest()
        if not hmac.compare_digest(digest, wanted) or scheme.lower() != "bearer":
            raise ApiError(401, "The admin token is needed: send the header Authorization: Bearer TOKEN.")

    return check


def _worker(body: bytes) -> WorkerConfig:
    try:
        asked = msgspec.json.decode(body, type=NewWorker)
    except msgspec.MsgspecError as error:
        raise bad_request(f"Not a worker: {error}") from error
    if not asked.name or len(asked.name) > 64 or not asked.name.replace("-", "").replace(".", "").isalnum():
        raise bad_request("A worker's name has letters, digits, dots and hyphens, 64 at most.", "name")
    return WorkerConfig(
        name=asked.name,
        role=asked.role,
        url=_url(asked.url, "url", ("http", "https")),
        bootstrap_url=asked.bootstrap_url and _url(asked.bootstrap_url, "bootstrap_url", ("http", "https")),
        kv_events_url=asked.kv_events_url and _url(asked.kv_events_url, "kv_events_url", ("tcp",)),
        kv_replay_url=asked.kv_replay_url and _url(asked.kv_replay_url, "kv_replay_url", ("tcp",)),
    )


def _url(text: str, field: str, schemes: tuple[str, ...]) -> str:
    """Scheme, host and port and nothing else: paths are ours to choose, and credentials would be logged."""
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:
        parts, port = None, None
    whole = parts is not None and parts.scheme in schemes and parts.hostname and port
    if parts is None or not whole or parts.path.strip("/") or parts.query or parts.fragment or "@" in parts.netloc:
        raise bad_request(f"{field} must be {' or '.join(schemes)}://HOST:PORT.", field)
    return f"{parts.scheme}://{parts.netloc}"


def _unknown(name: str) -> ApiError:
    return ApiError(404, f"There is no worker {name[:64]}.")
