"""One token through every pair of prefill and decode, so that the handshake of their KV connectors does not become part
of the first request's time to first token."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from pdserve.pd.errors import ApiError, ClientGoneError
from pdserve.pd.http.reply import HttpReply, ReplyConnection
from pdserve.pd.random_id import new_id
from pdserve.pd.relay.client import Client
from pdserve.pd.requests.body import Body, encode
from pdserve.pd.requests.dialects import COMPLETIONS
from pdserve.pd.requests.request import ClientRequest
from pdserve.pd.routing.ask import RoutingRequest
from pdserve.pd.workers.engines import Engines
from pdserve.pd.workers.failure import WorkerFailedError
from pdserve.pd.workers.registry import Registry, Worker

log = logging.getLogger("pdserve.proxy")

Attempt = Callable[[ClientRequest, Client, Worker, Worker], Awaitable[None]]
_SECONDS = 60.0


class _NoClient(ReplyConnection):
    """The connection of a client that does not exist."""

    def __init__(self) -> None:
        self.congested = False

    def send(self, data: bytes) -> None:
        """It is not read."""

    def replied(self, reply: HttpReply) -> None:
        """Nothing follows."""

    def reset(self) -> None:
        """There is no client to see it."""

    def abort(self) -> None:
        """There is nothing to end."""


class Prewarm:
    """Warms each pair once for every life of its workers, one at a time, while clients are served."""

    def __init__(self, registry: Registry, engines: Engines, attempt: Attempt, model: str) -> None:
        self._registry, self._engines, self._attempt = registry, engines, attempt
        self._body = Body(encode({"model": model, "prompt": "Hello", "max_tokens": 1, "temperature": 0}))
        self._warm: set[tuple[str, int, str, int]] = set()
        self._wanted = asyncio.Event()
        self._task = asyncio.ensure_future(self._run())
        registry.on_ready(lambda _: self._wanted.set())

    def stop(self) -> None:
        self._task.cancel()

    async def _run(self) -> None:
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            for prefill in self._registry.ready("prefill"):
                for decode in self._registry.ready("decode"):
                    pair = (prefill.name, prefill.life, decode.name, decode.life)
                    if pair not in self._warm:
                        self._warm.add(pair)
                        await self._warm_up(prefill, decode)

    async def _warm_up(self, prefill: Worker, decode: Worker) -> None:
        request_id = f"prewarm-{new_id()}"
        reply = HttpReply(_NoClient(), keep_alive=False, head_only=False, http10=False)
        client = Client(reply, request_id, COMPLETIONS)
        headers = self._engines.client_headers((), request_id, ours=True)
        request = ClientRequest(
            COMPLETIONS, self._body, b"/v1/completions", request_id, headers, RoutingRequest(b"Hello", estimate=1)
        )
        timer = asyncio.get_running_loop().call_later(_SECONDS, client.interrupt, ClientGoneError())
        try:
            await self._attempt(request, client, prefill, decode)
        except (ApiError, ClientGoneError, WorkerFailedError) as error:
            log.warning("%s and %s could not be warmed up: %s", prefill.name, decode.name, error)
        finally:
            timer.cancel()
