"""One token through one pair of prefill and decode, whatever their state is: nobody's request, so it is in no client's
figures, waits for no place in a pool and is tried with no other worker."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from typing import Final

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

Attempt = Callable[[ClientRequest, Client, Worker, Worker], Awaitable[None]]
LATE: Final = 504
_TOKEN_IDS: Final = range(16, 240)
"""Every vocabulary has these, and hardly any a special token among them."""


class _NoClient(ReplyConnection):
    """The connection of a client that does not exist."""

    def __init__(self) -> None:
        self.congested = False

    def send(self, data: bytes) -> None:
        """Drop the data: it is not read."""

    def replied(self, reply: HttpReply) -> None:
        """Do nothing: no request follows."""

    def reset(self) -> None:
        """Do nothing: there is no client to see it."""

    def abort(self) -> None:
        """Do nothing: there is nothing to end."""


class PairCanary:
    """Sends the canaries of one proxy process."""

    def __init__(self, engines: Engines, attempt: Attempt, model: str) -> None:
        self._engines, self._attempt, self._model = engines, attempt, model

    async def send(self, prefill: Worker, decode: Worker, *, tokens: int, seconds: float) -> None:
        """Send a prompt that no cache has through a pair, and return once decode has answered. Raises ApiError when it
        has not; its status is LATE when the answer took longer than `seconds`. `tokens`: the length of the prompt."""
        prompt = random.choices(_TOKEN_IDS, k=tokens)  # noqa: S311  (new, not secret)
        body = Body(encode({"model": self._model, "prompt": prompt, "max_tokens": 1, "temperature": 0}))
        request_id = f"canary-{new_id()}"
        reply = HttpReply(_NoClient(), keep_alive=False, head_only=False, http10=False)
        client = Client(reply, request_id, COMPLETIONS)
        headers = self._engines.client_headers((), request_id, ours=True)
        ask = RoutingRequest(b"", estimate=tokens)
        request = ClientRequest(COMPLETIONS, body, b"/v1/completions", request_id, headers, ask)
        late = ApiError(LATE, f"no token through {prefill.name} and {decode.name} within {seconds:g} s")
        timer = asyncio.get_running_loop().call_later(seconds, client.interrupt, late)
        try:
            await self._attempt(request, client, prefill, decode)
        except WorkerFailedError as failure:
            raise failure.error from failure
        except ClientGoneError as gone:
            raise ApiError(503, "The proxy is shutting down.") from gone
        finally:
            timer.cancel()
        if client.counted is not None and client.counted[1] == 0:
            raise ApiError(502, f"{decode.name} answered without a token")


log = logging.getLogger("pdserve.proxy")

_SECONDS = 60.0
_TOKENS = 2


class Prewarm:
    """Warms each pair once for every life of its workers, one at a time, while clients are served."""

    def __init__(self, registry: Registry, canary: PairCanary) -> None:
        self._registry, self._canary = registry, canary
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
        try:
            await self._canary.send(prefill, decode, tokens=_TOKENS, seconds=_SECONDS)
        except ApiError as error:
            log.warning("%s and %s could not be warmed up: %s", prefill.name, decode.name, error)
