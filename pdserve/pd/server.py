"""The proxy's listening server and its end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from pdserve.pd.config import ProxyConfig

log = logging.getLogger("pdserve.proxy")


class Server(uvicorn.Server):
    """uvicorn that drains by our rules: requests cut at the end of the drain get an error, and the exit code is 0."""

    def __init__(self, app: ASGIApp, config: ProxyConfig, drain: Callable[[], Coroutine[Any, Any, None]]) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                host=config.host,
                port=config.port,
                access_log=False,
                log_level="warning",
                server_header=False,
                timeout_keep_alive=60,
                # The second after the drain is for sending the errors.
                timeout_graceful_shutdown=int(config.drain_seconds) + 2,
            )
        )
        self._drain = drain

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for server in self.servers:
            for bound in server.sockets:
                log.info("serving on http://%s:%d", *bound.getsockname()[:2])

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """uvicorn would raise the signal again at the end, which is a death by signal to a supervisor."""
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signum, self._stop, signum)
        yield

    def _stop(self, signum: signal.Signals) -> None:
        if self.should_exit:
            # A second Ctrl-C: somebody at a terminal does not want to wait.
            self.force_exit = self.force_exit or signum == signal.SIGINT
            return
        log.info("draining")
        self.should_exit = True
        self._draining = asyncio.ensure_future(self._drain())
