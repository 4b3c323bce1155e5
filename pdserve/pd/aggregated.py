"""No prefill/decode split: each request goes to one engine as it is, prompt lists and n included."""

from __future__ import annotations

import logging

from pdserve.pd.errors import WorkerFailedError
from pdserve.pd.registry import Registry, Worker
from pdserve.pd.relay import Client, Leg, Upstream
from pdserve.pd.requests import ClientRequest, encode
from pdserve.pd.waiting import Watch

log = logging.getLogger("pdserve.proxy")

ATTEMPTS = 2


class Aggregated:
    """The protocol object of one proxy."""

    def __init__(self, registry: Registry, upstream: Upstream) -> None:
        self._registry = registry
        self._upstream = upstream

    async def serve(self, request: ClientRequest, client: Client) -> None:
        """Answer one client; once more at another worker if the first one fails before its first byte."""
        body = encode(request.body)
        avoid: set[Worker] = set()
        for attempt in range(1, ATTEMPTS + 1):
            worker = self._registry.pick("aggregated", avoid)
            try:
                await self._attempt(request, body, client, worker)
            except WorkerFailedError as failure:
                avoid.add(failure.worker)
                others = self._registry.ready("aggregated", avoid)
                if attempt == ATTEMPTS or client.started or not failure.retry or not others:
                    raise failure.error from failure
                log.warning("%s: %s; once more", client.request_id, failure)
            else:
                return

    async def drained(self) -> None:
        """Nothing ever runs in the background."""

    async def _attempt(self, request: ClientRequest, body: bytes, client: Client, worker: Worker) -> None:
        watch = Watch(client, (worker,))
        leg = Leg(self._upstream, worker, request.path, body, request.headers)
        try:
            await watch.first(leg.answer)
            await watch.race(client.relay(leg.answer.result(), worker))
        finally:
            await leg.close()
