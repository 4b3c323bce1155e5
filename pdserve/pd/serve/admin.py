"""The admin endpoints: workers come and go while the proxy serves, keys and policies are read again, and the figures
show each API key.

They are on a port or socket of their own and ask for their own token, never for a client's key.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import hmac
import logging
import os
import socket
import stat
from collections.abc import Callable, Iterator
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

import msgspec
from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.types import ASGIApp

from pdserve.errors import StartError
from pdserve.pd.config.proxy import WorkerConfig
from pdserve.pd.config.settings import AdminSettings
from pdserve.pd.errors import ApiError, bad_request
from pdserve.pd.http import bridge
from pdserve.pd.http.connecting import factory
from pdserve.pd.http.connection import Connection
from pdserve.pd.http.front import SWEEP_SECONDS, ClientLimits, Front
from pdserve.pd.http.incoming import Request as HttpRequest
from pdserve.pd.http.reply import HttpReply
from pdserve.pd.limits.allowed_hosts import AllowedHosts
from pdserve.pd.limits.keys import read_token
from pdserve.pd.serve.control import ControlTarget
from pdserve.roles import EngineRole
from pdserve.time_limit import time_limit


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


_BACKLOG = 64


class AdminSocket:
    """Listens from the start, and answers nothing before it is served: so other proxies see that it is in use."""

    def __init__(self, path: Path) -> None:
        """OSError: the path cannot be had, and why."""
        self._path = path
        with _locked(path.parent):
            if _is_a_rest(path):
                path.unlink()
            self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            before = os.umask(0o177)
            try:
                self.listener.bind(str(path))
                self.listener.listen(_BACKLOG)
            except OSError:
                self.listener.close()
                raise
            finally:
                os.umask(before)
            self._made = _identity(path)

    def remove(self) -> None:
        """The file, if it is still ours. To be called before the listener is closed: until then its number
        is not another file's."""
        with contextlib.suppress(OSError), _locked(self._path.parent):
            if _identity(self._path) == self._made:
                self._path.unlink()


def _is_a_rest(path: Path) -> bool:
    """Return whether there is a socket that may be replaced. OSError: it may not."""
    try:
        info = path.lstat()
    except FileNotFoundError:
        return False
    if not stat.S_ISSOCK(info.st_mode):
        raise FileExistsError(errno.EEXIST, "there is a file, and it is no socket")
    if info.st_uid != os.geteuid():
        raise FileExistsError(errno.EEXIST, f"there is a socket of another user (uid {info.st_uid})")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return True
        except OSError as error:
            raise FileExistsError(
                errno.EEXIST, f"there is a socket that may be in use ({(error.strerror or str(error)).lower()})"
            ) from error
    raise FileExistsError(errno.EEXIST, "another process answers there, perhaps another proxy of this deployment")


def _identity(path: Path) -> tuple[int, int]:
    info = path.lstat()
    return info.st_dev, info.st_ino


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock the folder against other proxies. The lock is the folder's own: no file is left."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


log = logging.getLogger("pdserve.proxy")

_STOP_SECONDS = 1
_LIMITS = ClientLimits(
    max_body_bytes=1 << 20,
    max_header_bytes=16 << 10,
    header_seconds=5,
    body_idle_seconds=5,
    body_seconds=15,
    keep_alive_seconds=15,
    max_connections=32,
    max_buffered_bytes=8 << 20,
)
_REFUSED = (
    "The admin's port has no token and answers only its own machine, and the {shown}. Use 127.0.0.1 or localhost, or "
    "give it a token (proxy.admin.token_file)."
)


class AdminWorkers:
    """Lets an admin change the registry (Workers), and notifies the other processes of the proxy."""

    def __init__(self, gateway: ControlTarget, notify: Callable[[dict[str, Any]], None]) -> None:
        self._gateway, self._registry, self._notify = gateway, gateway.registry, notify

    def describe(self) -> list[dict[str, Any]]:
        return [worker.describe() for worker in self._registry.workers.values()]

    def add(self, worker: WorkerConfig) -> None:
        if worker.role not in self._registry.roles:
            raise ValueError(f"this deployment has no {worker.role} workers")
        if worker.name in self._registry.workers:
            raise ValueError(f"there is a worker {worker.name} already")
        if worker.url in {known.config.url for known in self._registry.workers.values()}:
            raise ValueError(f"there is a worker at {worker.url} already")
        if lack := self._gateway.config.lack_of(worker):
            raise ValueError(lack)
        self._gateway.add_worker(worker)
        self._notify({"add": worker.model_dump()})

    def drain(self, name: str) -> None:
        self._registry.set_state(name, "draining")
        self._notify({"worker": name, "state": "draining"})

    def remove(self, name: str) -> None:
        self._registry.remove(name)
        self._notify({"remove": name})


class AdminServer:
    """Owns its socket and, for a unix socket, the file."""

    def __init__(self, settings: AdminSettings, workers: Workers, reload: Reload, figures: Figures) -> None:
        """RecipeError: the token's file cannot be used. StartError: the address cannot be had."""
        token = None if settings.token_file is None else read_token(Path(settings.token_file))
        self._file: AdminSocket | None = None
        try:
            if settings.socket is not None:
                self._file = AdminSocket(Path(settings.socket))
                self._socket = self._file.listener
            else:
                self._socket = _bound(settings)
        except OSError as error:
            raise StartError(
                f"the admin's listener cannot have {settings.socket or settings.port}: {error.strerror or error}",
                where="proxy.admin",
                todo="see who has it (ss -lntxp) and end that, or give proxy.admin another port or socket",
            ) from error
        # A page of another site reaches a port of this machine by its user's browser; it has no token, and no socket.
        open_to_pages = token is None and settings.socket is None
        hosts = AllowedHosts((settings.host,), _REFUSED) if open_to_pages else None
        self._answers = _Answers(app(workers, reload, figures, token), hosts)
        self._front = Front(self._answers, _LIMITS)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start to listen: no connection is refused from here on."""
        self._socket.listen(_BACKLOG)
        self._task = asyncio.ensure_future(self._serve())

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        accept = factory(partial(Connection, self._front))
        if self._file is None:
            server = await loop.create_server(accept, sock=self._socket, backlog=_BACKLOG)
        else:
            server = await loop.create_unix_server(accept, sock=self._socket, backlog=_BACKLOG)
        try:
            while True:
                await asyncio.sleep(SWEEP_SECONDS)
                self._front.sweep()
        finally:
            server.close()

    async def stop(self) -> None:
        """Requests that run have a second to end."""
        if self._file is not None:
            self._file.remove()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
        self._front.close_idle()
        with contextlib.suppress(TimeoutError):
            async with time_limit(_STOP_SECONDS):
                await self._answers.idle()
        self._front.abort()
        self._socket.close()


class _Answers:
    """The Handler of its front."""

    def __init__(self, app: ASGIApp, hosts: AllowedHosts | None) -> None:
        self._app, self._hosts = app, hosts
        self._tasks: set[asyncio.Task[None]] = set()

    async def idle(self) -> None:
        """Returns when nothing is being answered."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    def refuse(self, request: HttpRequest) -> ApiError | None:
        hosts = self._hosts
        return None if hosts is None else hosts.refusal(request.header(b"host"), request.header(b"origin"))

    def handle(self, request: HttpRequest, reply: HttpReply) -> None:
        task = asyncio.get_running_loop().create_task(bridge.serve(self._app, request, reply))
        self._tasks.add(task)
        task.add_done_callback(partial(self._done, request, reply))

    def failed(self, _: HttpRequest | None, reply: HttpReply, error: ApiError) -> None:
        body = msgspec.json.encode(error.body())
        headers = {"content-type": "application/json", **error.headers()}
        reply.start(error.status, [(name.encode(), value.encode()) for name, value in headers.items()], len(body))
        reply.end(body)

    def _done(self, request: HttpRequest, reply: HttpReply, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        request.release()
        if task.cancelled() or (error := task.exception()) is None:
            return
        log.error("the admin's %s failed", request.path.decode("latin-1"), exc_info=error)
        if not reply.ended:
            self.failed(request, reply, ApiError(500, f"The proxy failed: {type(error).__name__}"))


def _bound(settings: AdminSettings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind((settings.host, settings.port or 0))
    return sock
