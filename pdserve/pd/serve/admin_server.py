"""The admin's own listener, in the proxy's process: a loopback port or a unix socket, never the clients' port.

Its connections have limits of their own: a local user without the token must not take the descriptors that clients
need.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from starlette.types import ASGIApp

from pdserve.errors import StartError
from pdserve.pd.config.proxy import WorkerConfig
from pdserve.pd.config.settings import AdminSettings
from pdserve.pd.errors import ApiError
from pdserve.pd.http import bridge
from pdserve.pd.http.connecting import factory
from pdserve.pd.http.connection import Connection
from pdserve.pd.http.front import SWEEP_SECONDS, ClientLimits, Front, Request
from pdserve.pd.http.reply import HttpReply
from pdserve.pd.limits.allowed_hosts import AllowedHosts
from pdserve.pd.limits.keys import read_token
from pdserve.pd.serve import admin
from pdserve.pd.serve.admin_socket import AdminSocket
from pdserve.pd.serve.control import ControlTarget
from pdserve.time_limit import time_limit

log = logging.getLogger("pdserve.proxy")

_STOP_SECONDS = 1
_BACKLOG = 64
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
    """Lets an admin change the registry (admin.Workers), and notifies the other processes of the proxy."""

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

    def __init__(
        self, settings: AdminSettings, workers: admin.Workers, reload: admin.Reload, figures: admin.Figures
    ) -> None:
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
        self._answers = _Answers(admin.app(workers, reload, figures, token), hosts)
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

    def refuse(self, request: Request) -> ApiError | None:
        hosts = self._hosts
        return None if hosts is None else hosts.refusal(request.header(b"host"), request.header(b"origin"))

    def handle(self, request: Request, reply: HttpReply) -> None:
        task = asyncio.get_running_loop().create_task(bridge.serve(self._app, request, reply))
        self._tasks.add(task)
        task.add_done_callback(partial(self._done, request, reply))

    def failed(self, _: Request | None, reply: HttpReply, error: ApiError) -> None:
        body = msgspec.json.encode(error.body())
        headers = {"content-type": "application/json", **error.headers()}
        reply.start(error.status, [(name.encode(), value.encode()) for name, value in headers.items()], len(body))
        reply.end(body)

    def _done(self, request: Request, reply: HttpReply, task: asyncio.Task[None]) -> None:
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
