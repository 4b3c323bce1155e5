"""GET /v1/models and /version: what the workers serve, each model once, and what they are."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

from pdserve.pd.errors import ApiError
from pdserve.pd.http.fetch import FetchError, fetch
from pdserve.pd.requests.served_models import SHOWN, ServedModels
from pdserve.pd.workers.engines import Engines
from pdserve.pd.workers.registry import Registry, Worker

log = logging.getLogger("pdserve.proxy")

_SECONDS = 2.0
_FRESH_SECONDS = 1.0


class Models:
    """The answer of /v1/models. Asked for by many at once, or again within a second, the workers are asked once."""

    def __init__(self, registry: Registry, engines: Engines, served_name: str) -> None:
        self._registry, self._engines, self._served_name = registry, engines, served_name
        self._loop = asyncio.get_running_loop()
        self._asking: asyncio.Task[dict[str, Any]] | None = None
        self._fresh_until = 0.0

    async def listed(self) -> dict[str, Any]:
        if self._asking is None or (self._asking.done() and self._loop.time() >= self._fresh_until):
            self._asking = self._loop.create_task(models(self._registry, self._engines, self._served_name))
            self._asking.add_done_callback(self._mark_fresh)
        return await asyncio.shield(self._asking)

    def _mark_fresh(self, _: asyncio.Task[dict[str, Any]]) -> None:
        self._fresh_until = self._loop.time() + _FRESH_SECONDS


async def models(registry: Registry, engines: Engines, served_name: str) -> dict[str, Any]:
    """A model is listed when a worker of every role has it: only then can it be served. While no worker answers, what
    the configuration has."""
    listed: dict[str, Any] = {}
    of_roles = []
    for role in reversed(registry.roles):
        answers = await asyncio.gather(*(models_of(worker, engines) for worker in registry.ready(role)))
        cards = {card["id"]: card for cards in answers for card in cards}
        if cards:
            of_roles.append(set(cards))
            listed = cards | listed
    if of_roles:
        everywhere = set.intersection(*of_roles)
        return {"object": "list", "data": [card for name, card in listed.items() if name in everywhere]}
    card = {"id": served_name, "object": "model", "created": 0, "owned_by": "pdserve"}
    return {"object": "list", "data": [card]}


async def engine_version(registry: Registry, engines: Engines) -> dict[str, Any]:
    """Return the version that an engine answers, of those that clients get their answers from. ApiError: none is ready
    or answers."""
    role = registry.roles[-1]
    workers = registry.ready(role)
    if not workers:
        raise registry.no_worker(role)
    for worker in workers:
        try:
            answer = await fetch(worker.pool, "GET", "/version", headers=engines.key_header, timeout=_SECONDS)
            version = json.loads(answer.body) if answer.status == 200 else None
        except (FetchError, ValueError) as error:
            log.warning("%s does not answer with its version: %s", worker.name, error)
            continue
        if isinstance(version, dict):
            return version
    raise ApiError(502, "No engine answers with its version.")


async def models_of(worker: Worker, engines: Engines) -> list[dict[str, Any]]:
    """The cards of what one worker serves; empty when it does not answer."""
    try:
        answer = await fetch(worker.pool, "GET", "/v1/models", headers=engines.key_header, timeout=_SECONDS)
        data = json.loads(answer.body)["data"] if answer.status == 200 else []
    except (FetchError, ValueError, KeyError, TypeError) as error:
        log.warning("%s does not list its models: %s", worker.name, error)
        return []
    return [card for card in data if isinstance(card, dict) and isinstance(card.get("id"), str)]


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
