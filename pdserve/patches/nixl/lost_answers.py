"""The API server's half of nixl-abandoned-kv: an answer of prefill that is never read counts as an abort.

vLLM ends its part in a request when it has looked at the last output. An answer can still be lost on its last few
steps: its handler is cancelled before it has taken the output, or the connection is closed before the response is
written. Either way EngineCore is sent the abort that it would have been sent a moment before.

With one API server for several data-parallel engines the client of EngineCore has forgotten by then which of them had
the request, and sends nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakValueDictionary

from pdserve.patches import effects
from pdserve.patches.wrap import wrap

UNREAD, UNSENT = "answers-unread", "answers-unsent"
"""What it counts."""
_QUEUES = "pdserve_unread"
"""Attribute of an OutputProcessor: request id -> its queue, while the queue may still be read."""
_PARAMETERS = b'"kv_transfer_params":{'


def apply(patch: str) -> None:
    """Wraps two methods of OutputProcessor, and one of uvicorn's requests."""
    from uvicorn.protocols.http.httptools_impl import RequestResponseCycle
    from vllm.v1.engine.output_processor import OutputProcessor

    wrap(OutputProcessor, "_finish_request", patch=patch, around=_remembering)
    wrap(OutputProcessor, "abort_requests", patch=patch, around=lambda original: _with_unread(original, patch))
    wrap(RequestResponseCycle, "send", patch=patch, around=lambda original: _looking_at_the_client(original, patch))


def _remembering(original: Callable[..., None]) -> Callable[..., None]:
    def finish_request(self: Any, state: Any) -> None:
        original(self, state)
        if state.queue is not None and state.parent_req is None:
            self.__dict__.setdefault(_QUEUES, WeakValueDictionary())[state.request_id] = state.queue

    return finish_request


def _with_unread(original: Callable[..., list[str]], patch: str) -> Callable[..., list[str]]:
    def abort_requests(self: Any, request_ids: Iterable[str], internal: bool) -> list[str]:
        names = tuple(request_ids)
        aborted = original(self, names, internal)
        if internal:
            # By the task that would have read it, and that ends with this.
            for name in names:
                queue = getattr(self, _QUEUES, {}).pop(name, None)
                output = getattr(queue, "output", None)
                if _has_parameters(output):
                    aborted.append(name)
                    effects.count(patch, UNREAD)
        return aborted

    return abort_requests


def _has_parameters(output: Any) -> bool:
    return bool(getattr(output, "finished", False)) and bool(getattr(output, "kv_transfer_params", None))


def _looking_at_the_client(original: Callable[..., Any], patch: str) -> Callable[..., Any]:
    async def send(self: Any, message: Any) -> None:
        body = message.get("body", b"")
        lost = _PARAMETERS in body and (self.disconnected or self.transport.is_closing())
        await original(self, message)
        if lost and (name := _kept_under(body)):
            effects.count(patch, UNSENT)
            await self.scope["app"].state.engine_client.engine_core.abort_requests_async([name])

    return send


def _kept_under(body: bytes) -> str:
    """EngineCore's name of the request whose KV a decode would pull; empty: this is no answer of prefill."""
    try:
        parameters = json.loads(body).get("kv_transfer_params") or {}
    except ValueError:
        # A piece of a stream: of an answer that no decode can use, because it is not complete.
        return ""
    return str(parameters.get("remote_request_id") or "") if parameters.get("do_remote_prefill") else ""
