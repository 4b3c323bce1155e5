"""Asks the engines what they serve: what all of them would refuse is refused before any leg (requests.served_models).

Two engines that refuse a request have cost both of them a look at it, and a transfer that must be withdrawn.
"""

from __future__ import annotations

import asyncio
import logging

from pdserve.pd.errors import ApiError
from pdserve.pd.requests.served_models import SHOWN, ServedModels
from pdserve.pd.workers.engines import Engines
from pdserve.pd.workers.models import models_of
from pdserve.pd.workers.registry import Registry, Worker

log = logging.getLogger("pdserve.proxy")

ASK_AGAIN_SECONDS = 1.0
"""An engine may load an adapter while it serves. So a name that is not known is passed on, and the engines are asked
for their models again, but not more often than this."""


class Catalog:
    """The models that the workers serve, asked of each worker that becomes ready."""

    def __init__(self, registry: Registry, engines: Engines) -> None:
        self._registry, self._engines = registry, engines
        self._loop = asyncio.get_running_loop()
        self._of_worker: dict[Worker, dict[str, int | None]] = {}
        self.served = ServedModels(self._unknown)
        self._asked = -ASK_AGAIN_SECONDS
        self._tasks: set[asyncio.Task[None]] = set()
        registry.on_ready(self._learn)
        registry.on_lost(self._forget)

    def _unknown(self, model: str) -> None:
        now = self._loop.time()
        if now - self._asked >= ASK_AGAIN_SECONDS:
            self._asked = now
            for worker in self._registry.workers.values():
                if worker.state == "ready":
                    self._learn(worker)
            return
        aliases = ", ".join(self.served.names)
        message = f"The model `{model[:SHOWN]}` does not exist. Valid aliases: {aliases}."
        raise ApiError(404, message, type_="NotFoundError", param="model")

    # --- what the engines serve

    def _learn(self, worker: Worker) -> None:
        task = self._loop.create_task(self._ask(worker))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _ask(self, worker: Worker) -> None:
        cards = await models_of(worker, self._engines)
        if cards and self._registry.workers.get(worker.name) is worker:
            limits = ((card["id"], card.get("max_model_len")) for card in cards)
            served = {name: limit if isinstance(limit, int) else None for name, limit in limits}
            if self._of_worker.get(worker) != served:
                log.info("%s serves %s", worker.name, ", ".join(served))
                self._of_worker[worker] = served
                self.served.merge(self._of_worker.values())

    def _forget(self, worker: Worker) -> None:
        self._of_worker.pop(worker, None)
        self.served.merge(self._of_worker.values())
