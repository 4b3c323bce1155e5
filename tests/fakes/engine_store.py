"""The fake's stored responses: VLLM_ENABLE_RESPONSES_API_STORE, background, GET, cancel and previous_response_id, as in
vllm/entrypoints/openai/responses/serving.py of 0.32."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

from tests.fakes.engine_openai import ApiError, ResponsesJob, named
from tests.fakes.engine_script import Gate
from tests.fakes.microhttp import Request, Responder

PATH = re.compile(r"/v1/responses/([^/]+)(/cancel)?")


@dataclass
class Store:
    """The responses that one engine keeps."""

    gate: Gate
    responses: dict[str, dict[str, Any]] = field(default_factory=dict)
    enabled: bool = field(default_factory=lambda: os.environ.get("VLLM_ENABLE_RESPONSES_API_STORE") == "1")
    _tasks: dict[str, asyncio.Task[None]] = field(default_factory=dict)

    def check(self, body: dict[str, Any]) -> None:
        """Refuses what cannot be continued or kept."""
        before = body.get("previous_response_id")
        if before is not None and before not in self.responses:
            raise _unknown(before)
        if body.get("background") and not self.enabled:
            raise ApiError(400, "This vLLM engine does not support `store=True`")

    def keep(self, body: dict[str, Any], response: dict[str, Any]) -> None:
        if self.enabled and body.get("store", True):
            self.responses[response["id"]] = response
            self.gate.notify()

    def begin(self, job: ResponsesJob, work: Coroutine[Any, Any, None]) -> dict[str, Any]:
        """A response that is computed in the background."""
        response = job.response("queued", done=False)
        self.responses[response["id"]] = response
        self._tasks[response["id"]] = asyncio.create_task(work)
        return response

    async def handle(self, request: Request, responder: Responder) -> bool:
        """True: it was about a stored response."""
        match = PATH.fullmatch(request.path)
        if match is None or request.method != ("POST" if match[2] else "GET"):
            return False
        name = match[1]
        if name not in self.responses:
            raise _unknown(name)
        if match[2]:
            if self.responses[name]["status"] != "queued":
                raise ApiError(400, "Cannot cancel a synchronous response.", "invalid_request_error")
            self._tasks[name].cancel()
            self.responses[name]["status"] = "cancelled"
        elif request.query.get("stream") == "true":
            await responder.open_stream("text/event-stream; charset=utf-8")
            for number, kind in enumerate(("response.created", "response.output_item.added")):
                await responder.chunk(named({"type": kind, "sequence_number": number}))
            await self.gate.until(lambda: self.responses[name]["status"] != "queued")
            done = {"type": "response.completed", "response": self.responses[name], "sequence_number": 2}
            await responder.chunk(named(done))
            await responder.close_stream()
            return True
        await responder.send(200, self.responses[name])
        return True


def _unknown(name: str) -> ApiError:
    return ApiError(404, f"Response with id '{name}' not found.", "invalid_request_error")
