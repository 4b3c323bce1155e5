"""The APIs of the fake: what a body asks for, and replies and events in vLLM's form.

OpenAI's completions and chats, and what vLLM 0.32 makes of a chat for the clients of OpenAI's Responses and Anthropic's
Messages. Shapes and the order of events as in vllm/entrypoints/openai/responses and vllm/entrypoints/anthropic; one
text output.
"""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from tests.fakes.engine_model import detokenize, prompt_logprobs, render_chat, tokenize

Token = tuple[int, float]


class ApiError(Exception):
    """An error in vLLM's JSON form."""

    def __init__(self, status: int, message: str, kind: str = "BadRequestError") -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind

    def body(self) -> dict[str, Any]:
        return {"error": {"message": str(self), "type": self.kind, "param": None, "code": self.status}}


FINGERPRINT = {"system_fingerprint": "vllm-0.32.0-tp1"}
"""Of a stream: in its event with the usage, else in the last event of each choice."""


@dataclass
class Shape:
    """A request body, understood."""

    chat: bool
    model: str | None
    prompts: list[list[int]]
    n: int
    max_tokens: int
    stream: bool
    usage: bool
    continuous: bool
    ignore_eos: bool
    stop_token_ids: list[int]
    token_ids: bool
    prompt_logprobs: bool
    logprobs: bool
    echo: bool
    cache_salt: str

    def check(self, served: str, max_model_len: int) -> None:
        if self.model and self.model != served:
            raise ApiError(404, f"The model `{self.model}` does not exist.", "NotFoundError")
        longest = max(len(prompt) for prompt in self.prompts)
        if longest + self.max_tokens > max_model_len:
            raise ApiError(400, f"This model's maximum context length is {max_model_len} tokens.")


def parse(body: dict[str, Any], *, chat: bool) -> Shape:
    if chat:
        if not isinstance(body.get("messages"), list):
            raise ApiError(400, "messages: Field required")
        prompts = [tokenize(render_chat(body))]
    else:
        prompts = _prompts(body.get("prompt"))
    wanted = body.get("max_completion_tokens") or body.get("max_tokens")
    max_tokens = (32 if chat else 16) if wanted is None else wanted
    if not isinstance(max_tokens, int) or max_tokens < 1:
        raise ApiError(400, f"max_tokens must be at least 1, got {max_tokens}.")
    if (body.get("min_tokens") or 0) > max_tokens:
        raise ApiError(400, "min_tokens must be less than or equal to max_tokens")
    stream = bool(body.get("stream"))
    if body.get("stream_options") and not stream:
        raise ApiError(400, "Stream options can only be defined when `stream=True`.")
    return Shape(
        chat=chat,
        model=body.get("model"),
        prompts=prompts,
        n=body.get("n") or 1,
        max_tokens=max_tokens,
        stream=stream,
        usage=bool((body.get("stream_options") or {}).get("include_usage")),
        continuous=bool((body.get("stream_options") or {}).get("continuous_usage_stats")),
        ignore_eos=bool(body.get("ignore_eos")),
        stop_token_ids=body.get("stop_token_ids") or [],
        token_ids=bool(body.get("return_token_ids")),
        prompt_logprobs=body.get("prompt_logprobs") is not None,
        logprobs=body.get("logprobs") not in (None, False),
        echo=bool(body.get("echo")),
        cache_salt=body.get("cache_salt") or "",
    )


def _prompts(prompt: Any) -> list[list[int]]:
    match prompt:
        case str():
            return [tokenize(prompt)]
        case [int(), *_]:
            return [list(prompt)]
        case [str(), *_]:
            return [tokenize(text) for text in prompt]
        case [[int(), *_], *_]:
            return [list(ids) for ids in prompt]
    raise ApiError(400, "Either prompt or prompt_embeds must be provided and non-empty.")


class Job:
    """One request on its way: what is known of its answer so far."""

    def __init__(self, shape: Shape, request_id: str, args: Namespace) -> None:
        self.shape = shape
        self.args = args
        self.id = f"{'chatcmpl' if shape.chat else 'cmpl'}-{request_id}"
        self.started = False
        self.sees_context = True
        self.cached = 0
        self.generated = 0
        self.finish_reason = "length"
        self.transfer: dict[str, Any] | None = None
        """Where the KV is that this engine keeps, in an answer that is no stream."""

    @property
    def choices(self) -> int:
        return len(self.shape.prompts) * self.shape.n

    def prompt(self, index: int) -> list[int]:
        return self.shape.prompts[index // self.shape.n]

    def reply(self, choices: Sequence[Sequence[Token]]) -> dict[str, Any]:
        self.generated = sum(len(tokens) for tokens in choices)
        return {
            **self._head("chat.completion" if self.shape.chat else "text_completion"),
            "choices": [self._choice(index, tokens) for index, tokens in enumerate(choices)],
            "usage": self._usage(),
            "kv_transfer_params": self.transfer,
        }

    def events(self, index: int, token: Token, *, first: bool) -> Iterator[bytes]:
        self.generated += 1
        if not self.shape.chat:
            yield self._event({"index": index, "text": detokenize([token[0]]), **self._logprobs(index, [token])})
            return
        if first:
            yield self._event({"index": index, "delta": {"role": "assistant", "content": ""}})
        yield self._event(
            {"index": index, "delta": {"content": detokenize([token[0]])}, **self._logprobs(index, [token])}
        )

    def last_event(self, index: int) -> bytes:
        empty: dict[str, Any] = {"delta": {}} if self.shape.chat else {"text": ""}
        fingerprint = {} if self.shape.usage else FINGERPRINT
        return self._event({"index": index, **empty, "finish_reason": self.finish_reason}, **fingerprint)

    def usage_event(self) -> bytes | None:
        return self._event(None, usage=self._usage(), **FINGERPRINT) if self.shape.usage else None

    def opening(self) -> Iterator[bytes]:
        """Events that are sent before the engine has done anything."""
        return iter(())

    def closing(self) -> bytes:
        """The end of every stream."""
        return b"data: [DONE]\n\n"

    def error_event(self, error: ApiError) -> bytes:
        return b"data: " + json.dumps(error.body()).encode() + b"\n\n"

    def _event(self, choice: dict[str, Any] | None, **more: Any) -> bytes:
        head = self._head("chat.completion.chunk" if self.shape.chat else "text_completion")
        choices = [] if choice is None else [{"logprobs": None, "finish_reason": None} | choice]
        counts = {"usage": self._usage()} if self.shape.usage and self.shape.continuous else {}
        return b"data: " + json.dumps({**head, "choices": choices, **counts, **more}).encode() + b"\n\n"

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": 0, "model": self.args.served_model_name}

    def _choice(self, index: int, tokens: Sequence[Token]) -> dict[str, Any]:
        text = detokenize([token for token, _ in tokens])
        choice: dict[str, Any] = {"index": index, "finish_reason": self.finish_reason, "logprobs": None}
        if self.shape.chat:
            choice["message"] = {"role": "assistant", "content": text}
        else:
            choice["text"] = (detokenize(self.prompt(index)) if self.shape.echo else "") + text
            if self.shape.prompt_logprobs:
                choice["prompt_logprobs"] = prompt_logprobs(self.prompt(index), sees_context=self.sees_context)
        if self.shape.token_ids:
            choice["token_ids"] = [token for token, _ in tokens]
        return choice | self._logprobs(index, tokens)

    def _logprobs(self, index: int, tokens: Sequence[Token]) -> dict[str, Any]:
        if not self.shape.logprobs:
            return {}
        pairs = [(detokenize([token]), value) for token, value in tokens]
        if self.shape.chat:
            content = [{"token": t, "logprob": v, "bytes": list(t.encode()), "top_logprobs": []} for t, v in pairs]
            return {"logprobs": {"content": content}}
        return {
            "logprobs": {
                "text_offset": list(range(len(pairs))),
                "tokens": [t for t, _ in pairs],
                "token_logprobs": [v for _, v in pairs],
                "top_logprobs": [{t: v} for t, v in pairs],
            }
        }

    def _usage(self) -> dict[str, Any]:
        prompt = sum(len(ids) for ids in self.shape.prompts)
        usage: dict[str, Any] = {"prompt_tokens": prompt, "completion_tokens": self.generated}
        usage["total_tokens"] = prompt + self.generated
        usage["prompt_tokens_details"] = None
        if self.args.enable_prompt_tokens_details:
            usage["prompt_tokens_details"] = {"cached_tokens": self.cached}
        return usage


RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
CHAT, BATCH, INVOCATIONS = "/v1/chat/completions", "/v1/chat/completions/batch", "/invocations"


def shape_of(path: str, body: dict[str, Any]) -> Shape:
    """Return the completion that a request of any API asks for."""
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

    _at: ClassVar[dict[str, Any]] = {"content_index": 0, "output_index": 0, "item_id": "msg_1"}
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
        yield self._numbered("response.output_text.delta", **self._at, delta=text, logprobs=[])

    def last_event(self, index: int) -> bytes:
        return self._numbered("response.output_text.done", **self._at, text=self._text, logprobs=[])

    def usage_event(self) -> bytes | None:
        # vLLM names it completed whatever the status is.
        return self._numbered("response.completed", response=self.response("completed", done=True))

    def closing(self) -> bytes:
        return b""

    def _numbered(self, kind: str, **fields: Any) -> bytes:
        self._sequence += 1
        return named({**fields, "sequence_number": self._sequence, "type": kind})

    def response(self, status: str, *, done: bool) -> dict[str, Any]:
        part: dict[str, Any] = {"type": "output_text", "text": self._text, "annotations": [], "logprobs": None}
        item = {"id": "msg_1", "type": "message", "role": "assistant", "content": [part], "status": "completed"}
        usage = {
            "input_tokens": len(self.prompt(0)),
            "input_tokens_details": {"cached_tokens": self.cached},
            "output_tokens": self.generated,
            "total_tokens": len(self.prompt(0)) + self.generated,
        }
        return {
            "id": f"resp_{self.id}",
            "created_at": 0,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": self.args.served_model_name,
            "object": "response",
            "output": [item] if done else [],
            "status": status,
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
