"""The admin's own listener, in the proxy's process: a loopback port or a unix socket, never the clients' port."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import uvicorn

from pdserve.errors import StartError
from pdserve.pd import admin
from pdserve.pd.admin_socket import AdminSocket
from pdserve.pd.config import WorkerConfig
from pdserve.pd.control import Controlled
from pdserve.pd.keys import read_token
from pdserve.pd.settings import Admin

_STOP_SECONDS = 1


class AdminWorkers:
    """What an admin may do to the registry (admin.Workers); the other processes of the proxy are told."""

    def __init__(self, gateway: Controlled, tell: Callable[[dict[str, Any]], None]) -> None:
        self._gateway, self._registry, self._tell = gateway, gateway.registry, tell

    def describe(self) -> list[dict[str, Any]]:
        return [worker.describe() for worker in self._registry.workers.values()]

    def add(self, worker: WorkerConfig) -> None:
        if worker.role not in self._registry.roles:
            raise ValueError(f"this deployment has no {worker.role} workers")
        if worker.url in {one.config.url for one in self._registry.workers.values()}:
            raise ValueError(f"there is a worker at {worker.url} already")
        self._gateway.add_worker(worker)
        self._tell({"add": worker.model_dump()})

    def drain(self, name: str) -> None:
        self._registry.set_state(name, "draining")
        self._tell({"worker": name, "state": "draining"})

    def remove(self, name: str) -> None:
        self._registry.remove(name)
        self._tell({"remove": name})


class AdminServer:
    """Owns its socket and, for a unix socket, the file."""

    def __init__(self, settings: Admin, workers: admin.Workers, reload: admin.Reload, figures: admin.Figures) -> None:
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
        config = uvicorn.Config(
            admin.app(workers, reload, figures, token),
            access_log=False,
            log_level="warning",
            lifespan="off",
            server_header=False,
            timeout_graceful_shutdown=_STOP_SECONDS,
        )
        self._server = _Quiet(config)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.ensure_future(self._server.serve(sockets=[self._socket]))

    async def stop(self) -> None:
        if self._file is not None:
            self._file.remove()
        self._server.should_exit = True
        if self._task is not None:
            await asyncio.wait({self._task})
        self._socket.close()


class _Quiet(uvicorn.Server):
    """Signals are the proxy's own business."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _bound(settings: Admin) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind((settings.host, settings.port or 0))
    return sock
