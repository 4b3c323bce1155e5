"""What the engines serve, and what every one of them would therefore refuse: it is refused before any leg.

Two engines that refuse a request have cost both of them a look at it, and a transfer that must be withdrawn. So what
can be known here is said here, in the engines' words (vLLM 0.32): the name of a model that nobody serves, a
conversation without a message, token ids beyond the context. Whether a text is too long only a tokenizer can say.
"""

from __future__ import annotations

import asyncio
import logging

import msgspec

from pdserve.pd.body import Body, decode, encode
from pdserve.pd.dialects import Dialect
from pdserve.pd.engines import Engines
from pdserve.pd.errors import ApiError, bad_request
from pdserve.pd.models import models_of
from pdserve.pd.registry import Registry, Worker

log = logging.getLogger("pdserve.proxy")

ASK_AGAIN_SECONDS = 1.0
"""An engine may load an adapter while it serves. So a name that is not known is passed on, and the engines are asked
for their models again, but not more often than this."""
_EMPTY_LIST_BYTES = 16
_BEGINNING_BYTES = 64
_BLANKS = b" \t\r\n"
_BYTES_OF_AN_ID = 2
"""At least, with its comma."""
_LOOK_BYTES = 16 * 1024 * 1024
_SHOWN = 256
"""Characters of a name that a client gives."""
_LONGEST_NAME = 16_384
"""Bytes: nobody reads megabytes to see that no model is called so."""


class Catalog:
    """Of one proxy process."""

    def __init__(self, registry: Registry, engines: Engines) -> None:
        self._registry, self._engines = registry, engines
        self._loop = asyncio.get_running_loop()
        self._of_worker: dict[Worker, dict[str, int | None]] = {}
        self._context: dict[str, int | None] = {}
        """Name of a model -> the longest prompt that every worker takes, None when they do not say."""
        self._as_written: dict[bytes, int | None] = {}
        """The same by the name as JSON."""
        self._least: int | None = None
        """Of all models."""
        self._asked = -ASK_AGAIN_SECONDS
        self._tasks: set[asyncio.Task[None]] = set()
        registry.on_ready(self._learn)
        registry.on_lost(self._forget)

    def check(self, dialect: Dialect, body: Body) -> None:
        """ApiError: every engine would refuse this."""
        if not self._context:
            return
        members = body.members
        limit = self._limit(_name(members["model"])) if "model" in members else self._least
        messages = members.get(dialect.list_of_messages) if dialect.list_of_messages is not None else None
        if messages is not None and len(memoryview(messages)) <= _EMPTY_LIST_BYTES and _is_empty_list(messages):
            raise bad_request("Cannot apply chat template to an empty conversation. Provide at least one message.")
        if limit is not None and not dialect.one_prompt and "truncate_prompt_tokens" not in members:
            _check_ids(body, limit)

    def _limit(self, written: bytes) -> int | None:
        """Of the model that a body names; `written`: as JSON."""
        if written in self._as_written:
            return self._as_written[written]
        # As vLLM: without a name it is the model that there is. What is no text at all is the engine's to refuse.
        model = decode(written) if written.startswith(b'"') else ""
        if model and model not in self._context:
            self._unknown(str(model))
        return self._context.get(model, self._least)

    def _unknown(self, model: str) -> None:
        now = self._loop.time()
        if now - self._asked >= ASK_AGAIN_SECONDS:
            self._asked = now
            for worker in self._registry.workers.values():
                if worker.state == "ready":
                    self._learn(worker)
            return
        aliases = ", ".join(self._context)
        message = f"The model `{model[:_SHOWN]}` does not exist. Valid aliases: {aliases}."
        raise ApiError(404, message, type_="NotFoundError", param="model")

    # --- what the engines say

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
                self._merge()

    def _forget(self, worker: Worker) -> None:
        self._of_worker.pop(worker, None)
        self._merge()

    def _merge(self) -> None:
        self._context = {}
        for limits in self._of_worker.values():
            for name, limit in limits.items():
                known = self._context.get(name)
                self._context[name] = limit if known is None else known if limit is None else min(known, limit)
        self._as_written = {encode(name): limit for name, limit in self._context.items()}
        self._least = min((limit for limit in self._context.values() if limit is not None), default=None)


def _name(value: msgspec.Raw) -> bytes:
    """As JSON. One that is too long for a name is cut, and so is the name of no model."""
    written = memoryview(value)
    if len(written) <= _LONGEST_NAME:
        return bytes(written)
    beginning = bytes(written[:_SHOWN]).decode("utf-8", "replace")
    return encode(beginning[1:]) if beginning.startswith('"') else beginning.encode()


def _is_empty_list(value: msgspec.Raw) -> bool:
    return bytes(value).translate(None, _BLANKS) == b"[]"


def _check_ids(body: Body, limit: int) -> None:
    """ApiError: a prompt of more token ids than that."""
    value = body.members.get("prompt")
    if value is None or len(memoryview(value)) <= limit * _BYTES_OF_AN_ID:
        return
    beginning = bytes(memoryview(value)[:_BEGINNING_BYTES]).translate(None, _BLANKS)
    if not (beginning[:1] == b"[" and beginning[1:2].isdigit()):
        return
    ids = body.count("prompt", b",", _LOOK_BYTES) + 1
    if ids > limit:
        raise bad_request(
            f"This model's maximum context length is {limit} tokens. However, your prompt contains {ids} input "
            "tokens, which exceeds this limit even without any output tokens. Please reduce the length of the "
            f"input prompt. (parameter=input_tokens, value={ids})",
            "input_tokens",
        )
