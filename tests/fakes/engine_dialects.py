"""The fake's Responses and Messages APIs: what vLLM 0.32 makes of a chat for OpenAI's and Anthropic's clients.

Shapes and the order of events as in vllm/entrypoints/openai/responses and vllm/entrypoints/anthropic; one text output.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tests.fakes.engine_model import detokenize
from tests.fakes.engine_openai import ApiError, Job, Shape, Token, parse

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
CHAT, BATCH, INVOCATIONS = "/v1/chat/completions", "/v1/chat/completions/batch", "/invocations"


def shape_of(path: str, body: dict[str, Any]) -> Shape:
    """What a request of any API asks for."""
    if path in JOBS:
        return as_chat(path, body)
    if path != BATCH:
        return parse(body, chat=path == CHAT or (path == INVOCATIONS and "messages" in body))
    shapes = [parse(body | {"messages": conversation}, chat=True) for conversation in body["messages"]]
    return replace(shapes[0], prompts=[prompt for shape in shapes for prompt in shape.prompts])


def as_chat(path: str, body: dict[str, Any]) -> Shape:
    """The chat that a request means."""
    chat = {name: value for name, value in body.items() if name not in ("input", "instructions", "system")}
    if path == RESPONSES:
        given = body["input"]
        messages = [{"role": "user", "content": given}] if isinstance(given, str) else list(given)
        system, chat["max_tokens"] = body.get("instructions"), body.get("max_output_tokens")
    else:
        if not isinstance(body.get("max_tokens"), int):
            raise ApiError(400, "max_tokens: Field required")
        messages, system = list(body["messages"]), body.get("system")
    chat["messages"] = [{"role": "system", "content": system}, *messages] if system else messages
    # The converter always asks for usage.
    chat["stream_options"] = {"include_usage": True} if body.get("stream") else None
    return parse(chat, chat=True)


def error_body(path: str, error: ApiError) -> dict[str, Any]:
    if path == MESSAGES:
        return {"type": "error", "error": {"type": error.kind, "message": str(error)}}
    return error.body()


def named(event: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), json.dumps(event).encode())


class ResponsesJob(Job):
    """/v1/responses."""

    _sequence = -1
    _text = ""

    def reply(self, choices: Sequence[Sequence[Token]]) -> dict[str, Any]:
        self.generated = len(choices[0])
        self._text = detokenize([token for token, _ in choices[0]])
        return self.response("completed" if self.finish_reason == "stop" else "incomplete", done=True)

    def opening(self) -> Iterator[bytes]:
        for kind in ("response.created", "response.in_progress"):
            yield self._numbered(kind, response=self.response("in_progress", done=False))

    def events(self, index: int, token: Token, *, first: bool) -> Iterator[bytes]:
        self.generated += 1
        text = detokenize([token[0]])
        self._text += text
        if first:
            item = {**self._item(), "content": [], "status": "in_progress"}
            yield self._numbered("response.output_item.added", output_index=0, item=item)
            part: dict[str, Any] = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            yield self._numbered("response.content_part.added", **self._at(), part=part)
        yield self._numbered("response.output_text.delta", **self._at(), delta=text, logprobs=[])

    def last_event(self, index: int) -> bytes:
        part: dict[str, Any] = {"type": "output_text", "text": self._text, "annotations": [], "logprobs": None}
        return b"".join(
            (
                self._numbered("response.output_text.done", **self._at(), text=self._text, logprobs=[]),
                self._numbered("response.content_part.done", **self._at(), part=part),
                self._numbered("response.output_item.done", output_index=0, item=self._item()),
            )
        )

    def usage_event(self) -> bytes | None:
        # vLLM names it completed whatever the status is.
        return self._numbered("response.completed", response=self.response("completed", done=True))

    def closing(self) -> bytes:
        return b""

    def _at(self) -> dict[str, Any]:
        return {"content_index": 0, "output_index": 0, "item_id": "msg_1"}

    def _item(self) -> dict[str, Any]:
        part: dict[str, Any] = {"type": "output_text", "text": self._text, "annotations": [], "logprobs": None}
        return {"id": "msg_1", "type": "message", "role": "assistant", "content": [part], "status": "completed"}

    def _numbered(self, kind: str, **fields: Any) -> bytes:
        self._sequence += 1
        return named({**fields, "sequence_number": self._sequence, "type": kind})

    def response(self, status: str, *, done: bool) -> dict[str, Any]:
        usage = {
            "input_tokens": len(self.prompt(0)),
            "input_tokens_details": {
                "cached_tokens": self.cached,
                "cache_write_tokens": 0,
                "input_tokens_per_turn": [],
                "cached_tokens_per_turn": [],
            },
            "output_tokens": self.generated,
            "output_tokens_details": {"reasoning_tokens": 0, "tool_output_tokens": 0},
            "total_tokens": len(self.prompt(0)) + self.generated,
        }
        return {
            "id": f"resp_{self.id}",
            "created_at": 0,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": None,
            "metadata": None,
            "model": self.args.served_model_name,
            "object": "response",
            "output": [self._item()] if done else [],
            "parallel_tool_calls": True,
            "temperature": 1.0,
            "tool_choice": "auto",
            "tools": [],
            "top_p": 1.0,
            "background": False,
            "max_output_tokens": self.shape.max_tokens,
            "service_tier": "auto",
            "status": status,
            "truncation": "disabled",
            "usage": usage if done else None,
            "kv_transfer_params": None,
        }


class MessagesJob(Job):
    """/v1/messages."""

    def reply(self, choices: Sequence[Sequence[Token]]) -> dict[str, Any]:
        self.generated = len(choices[0])
        text = detokenize([token for token, _ in choices[0]])
        content = [{"type": "text", "text": text}]
        return {**self._message(), "content": content, "stop_reason": self._reason(), "usage": self._used()}

    def events(self, index: int, token: Token, *, first: bool) -> Iterator[bytes]:
        if first:
            yield named({"type": "message_start", "message": {**self._message(), "usage": self._used()}})
            block = {"type": "text", "text": ""}
            yield named({"type": "content_block_start", "index": 0, "content_block": block})
        self.generated += 1
        delta = {"type": "text_delta", "text": detokenize([token[0]])}
        yield named({"type": "content_block_delta", "index": 0, "delta": delta})

    def last_event(self, index: int) -> bytes:
        return named({"type": "content_block_stop", "index": 0})

    def usage_event(self) -> bytes | None:
        delta = {"stop_reason": self._reason(), "stop_sequence": None}
        return named({"type": "message_delta", "delta": delta, "usage": self._used()})

    def closing(self) -> bytes:
        return named({"type": "message_stop"})

    def error_event(self, error: ApiError) -> bytes:
        return named({"type": "error", "error": {"type": "internal_error", "message": str(error)}})

    def _reason(self) -> str:
        return "end_turn" if self.finish_reason == "stop" else "max_tokens"

    def _message(self) -> dict[str, Any]:
        model = self.args.served_model_name
        return {"id": self.id, "type": "message", "role": "assistant", "content": [], "model": model}

    def _used(self) -> dict[str, Any]:
        # Anthropic's input_tokens are those that were not cached.
        used = {"input_tokens": len(self.prompt(0)) - self.cached, "output_tokens": self.generated}
        return used | ({"cache_read_input_tokens": self.cached} if self.args.enable_prompt_tokens_details else {})


JOBS: Mapping[str, type[Job]] = {RESPONSES: ResponsesJob, MESSAGES: MessagesJob}
