"""What happens to each request of a client: refused, relayed to engines, or answered by the application."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import uuid
from functools import partial
from typing import Any

from starlette.types import ASGIApp

from pdserve.pd.body import Body
from pdserve.pd.client import Client
from pdserve.pd.config import ProxyConfig
from pdserve.pd.dialects import BY_PATH, CHAT, Dialect
from pdserve.pd.dispatch import Dispatcher
from pdserve.pd.engines import Engines
from pdserve.pd.errors import ApiError, ClientGoneError
from pdserve.pd.http import bridge
from pdserve.pd.http.front import Request
from pdserve.pd.http.reply import Reply
from pdserve.pd.load import LoadBoard
from pdserve.pd.pools import Pools
from pdserve.pd.registry import RETRY_AFTER_SECONDS, Registry
from pdserve.pd.request import ClientRequest, Stages
from pdserve.pd.routing.ask import Ask
from pdserve.pd.shared_numbers import Numbers

log = logging.getLogger("pdserve.proxy")

REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,256}")
_BYTES_PER_TOKEN = 4


class Gateway:
    """The state of one proxy process: the Handler of its front, and what is Served. Must be made inside its loop."""

    def __init__(self, config: ProxyConfig, key: str | None, numbers: Numbers, app: ASGIApp) -> None:
        self.config = config
        self.draining = False
        self.registry = Registry(config, LoadBoard(numbers))
        self.engines = Engines(key, config.auth.client_authorization)
        self.pools = Pools(config, self.registry)
        self._app = app
        self._loop = asyncio.get_running_loop()
        self._dispatcher = Dispatcher(config, self.registry, self.pools, self.engines)
        self._clients: set[Client] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    # --- Handler

    def refuse(self, request: Request) -> ApiError | None:
        return None

    def handle(self, request: Request, reply: Reply) -> None:
        dialect = BY_PATH.get(request.path)
        if dialect is not None:
            if request.method == b"POST":
                self._start(self._answer(dialect, request, reply), request, reply)
            else:
                self.failed(request, reply, ApiError(405, "Method Not Allowed"))
        else:
            self._start(bridge.serve(self._app, request, reply), request, reply)

    def failed(self, request: Request | None, reply: Reply, error: ApiError) -> None:
        dialect = BY_PATH.get(request.path, CHAT) if request is not None else CHAT
        request_id = _request_id(request) if request is not None else uuid.uuid4().hex
        Client(reply, request_id, dialect).fail(error)

    # --- Served

    def begin(self) -> None:
        """Nothing to do: it was made in the loop."""

    def busy(self) -> bool:
        return bool(self._tasks)

    def cut(self) -> None:
        limit = ApiError(503, "The proxy is shutting down.", retry_after=RETRY_AFTER_SECONDS)
        for client in list(self._clients):
            client.interrupt(limit)

    async def finish(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._dispatcher.drained()
        self.registry.close()

    # --- for the application

    def readiness(self) -> tuple[bool, dict[str, Any]]:
        empty = self.registry.empty_pools()
        aggregate = self.config.routing.on_empty_pool == "aggregate" and len(empty) < len(self.registry.roles)
        ready = (not empty or aggregate) and not self.draining
        return ready, {
            "ready": ready,
            "draining": self.draining,
            "empty_pools": empty,
            "workers": [worker.describe() for worker in self.registry.workers.values()],
        }

    # --- inside

    async def _answer(self, dialect: Dialect, request: Request, reply: Reply) -> None:
        client = Client(reply, _request_id(request), dialect)
        self._clients.add(client)
        limit = ApiError(504, "The request took longer than this deployment allows.")
        timer = self._loop.call_later(self.config.request_timeout_seconds, client.interrupt, limit)
        try:
            await self._dispatcher.serve(self._read(dialect, request, client.request_id), client)
        except ApiError as error:
            log.warning("%s: %d %r", client.request_id, error.status, error.message)
            client.fail(error)
        except ClientGoneError:
            log.info("%s: the client left", client.request_id)
        finally:
            timer.cancel()
            self._clients.discard(client)

    def _read(self, dialect: Dialect, request: Request, request_id: str) -> ClientRequest:
        body = Body(request.body)
        prompt = dialect.prompt(body)
        return ClientRequest(
            dialect=dialect,
            body=body,
            target=request.target,
            request_id=request_id,
            headers=self.engines.client_headers(request.headers, request_id),
            ask=Ask(prompt, estimate=max(1, len(prompt) // _BYTES_PER_TOKEN)),
            stages=Stages(received=self._loop.time()),
        )

    def _start(self, work: Any, request: Request, reply: Reply) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(partial(self._done, request, reply))

    def _done(self, request: Request, reply: Reply, task: asyncio.Task[None]) -> None:
        """Nothing may leave a client without an end: what nobody expected is answered here."""
        self._tasks.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        log.error("%s failed", request.path.decode("latin-1"), exc_info=error)
        if not reply.ended:
            self.failed(request, reply, ApiError(500, f"The proxy failed: {type(error).__name__}"))


def _request_id(request: Request) -> str:
    """The client's own, if it is printable and not too long; else a new one."""
    given = request.header(b"x-request-id")
    if given is not None and REQUEST_ID.fullmatch(given):
        return given.decode("ascii")
    return uuid.uuid4().hex
