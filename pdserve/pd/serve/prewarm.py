"""One token through every pair of prefill and decode, so that the handshake of their KV connectors does not become part
of the first request's time to first token."""

from __future__ import annotations

import asyncio
import logging

from pdserve.pd.errors import ApiError
from pdserve.pd.serve.pair_canary import PairCanary
from pdserve.pd.workers.registry import Registry, Worker

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
