"""The APIs whose requests are split over prefill and decode, and what each means by its fields.

Both legs must tokenise to the same prompt, so whatever can shape the prompt stays in the prefill leg: messages, tools,
tool_choice and response_format too (the renderers of Kimi-K3 and Cohere put them into the prompt), templates,
truncation, cache_salt, media. What goes is what would end the one token other than by length, multiply it, or is only
about the answer. Sampling constraints (grammars, biases) stay: with ignore_eos they cannot end a request.

A request that one prefill and one decode leg cannot answer as a single engine would, or of which a field has a type
that we do not know, goes to one engine as it is: that engine answers it, or reports what is wrong with it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from pdserve.pd.errors import ApiError
from pdserve.pd.http.pieces import Payload
from pdserve.pd.requests.body import Body, write_object

_TRANSFER: Final = "kv_transfer_params"
_WRITTEN_TRANSFER: Final = b'"kv_transfer_params":'
INTERNAL: Final = frozenset((_TRANSFER, "ec_transfer_params"))
"""Between proxy and engines only. From a client they point decode at any address or end an EngineCore."""

NOT_FOR_PREFILL: Final = frozenset(
    (
        # They could end the token by "stop".
        *("stop", "stop_token_ids", "stop_sequences", "min_tokens"),
        # They multiply the sequences; only one of them can own the transfer.
        *("n", "best_of", "use_beam_search"),
        # They are about the answer, which no client reads here; some are invalid without the client's own max_tokens.
        *("stream_options", "stream_interval", "echo", "logprobs", "top_logprobs", "prompt_logprobs"),
        *("logprob_token_ids", "return_token_ids", "return_tokens_as_token_ids", "return_prompt_text"),
        *("return_mm_kwargs", "max_tool_calls", "include"),
    )
)

_LEFT_OUT: Final = INTERNAL | NOT_FOR_PREFILL

_SEQUENCE: Final = re.compile(rb'"sequence_number" ?: ?(\d{1,15})(?!\d)')
"""Not one of thousands of digits, which Python does not read; an answer repeats what its client has sent."""

_LARGEST_CHECKED: Final = 65_536
"""Bytes of a value that is looked at here; a larger one is the engine's to judge."""
_LONGEST_PROMPT: Final = 1_048_576
"""Bytes of a prompt that routing looks at."""

Check = Callable[[Any], bool]
_MOST: Final = 1 << 53
"""Of a count. With more than an integer of theirs holds, engines fail in ways of their own."""


def _count(least: int) -> Check:
    return lambda value: value is None or (type(value) is int and least <= value <= _MOST)


def _flag(value: Any) -> bool:
    return isinstance(value, bool | None)


def _only(*allowed: Any) -> Check:
    """Check for None, or exactly one of these: 1 and True differ here."""
    return lambda value: value is None or any(type(value) is type(option) and value == option for option in allowed)


def _strings(value: Any) -> bool:
    return isinstance(value, str | None) or _list_of(str)(value)


def _list_of(kind: type) -> Check:
    return lambda value: value is None or (isinstance(value, list) and all(type(item) is kind for item in value))


def _stream_options(value: Any) -> bool:
    return value is None or (
        isinstance(value, dict) and all(isinstance(inner, bool | None) for inner in value.values())
    )


# If decode alone refused a field, prefill would have computed in vain: so every field that the prefill leg does not
# get is looked at here. What does not pass is one engine's to judge.
_SPLITTABLE: Mapping[str, Check] = {
    "stream": _flag,
    "n": _only(1),
    "best_of": _only(1),
    "use_beam_search": _only(False),
    "prompt_logprobs": _only(),
    "prompt_embeds": _only(),
    "truncate_prompt_tokens": _count(0),
    "max_tokens": _count(1),
    "max_completion_tokens": _count(1),
    "max_output_tokens": _count(1),
    "stream_interval": _count(1),
    "min_tokens": _count(0),
    "top_logprobs": _count(0),
    "ignore_eos": _flag,
    "echo": _only(False),
    "return_token_ids": _flag,
    "return_tokens_as_token_ids": _flag,
    "return_prompt_text": _flag,
    "return_mm_kwargs": _flag,
    "stop": _strings,
    "stop_token_ids": _list_of(int),
    "logprob_token_ids": _list_of(int),
    "stop_sequences": _list_of(str),
    "stream_options": _stream_options,
    # State that one engine keeps under an id, for later requests.
    "background": _only(False),
    "previous_response_id": _only(),
}


_OBJECTS: Final = ("structured_outputs", "response_format", "logit_bias")
"""What prefill gets too, and where anything else makes both engines fail (vLLM 0.32: with 500)."""
_AN_OBJECT: Final = (b"{", b"n")
"""Or null."""


@dataclass(frozen=True)
class Dialect:
    """Describes one API."""

    name: str
    path: str
    prompt_fields: tuple[str, ...]
    """What of a body shapes the prompt, in the order in which templates use it."""
    prefill_fields: Mapping[str, bytes]
    """What the prefill leg's body has instead of the client's."""
    limits: tuple[str, ...] = ()
    """Limits of tokens that become 1 on prefill when the client has set them."""
    end_of_stream: bytes | None = None
    """In the last event of a complete stream."""
    checks: Mapping[str, Check] = field(default_factory=dict)
    """Beside those of all APIs."""
    list_of_messages: str | None = None
    """The member that must be a list."""
    single_prompt: bool = True
    """False: `prompt` may be a list of prompts."""
    _checks: Mapping[str, Check] = field(init=False, repr=False)
    _not_for_prefill: frozenset[str] = field(init=False, repr=False)
    _for_prefill: bytes = field(init=False, repr=False)
    """`prefill_fields` as they are written."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "_checks", {**_SPLITTABLE, **self.checks})
        object.__setattr__(self, "_not_for_prefill", _LEFT_OUT.union(self.prefill_fields))
        object.__setattr__(self, "_for_prefill", write_object({**self.prefill_fields, _TRANSFER: b""}))

    def needs_single_engine(self, body: Body) -> str | None:
        """Return the field because of which this request cannot be split; None: it can."""
        checks = self._checks
        large = len(body.raw) > _LARGEST_CHECKED
        for name in body.members:
            if name in checks and (
                (large and body.length(name) > _LARGEST_CHECKED) or not checks[name](body.get(name))
            ):
                return name
        if self.list_of_messages is not None and body.begins(self.list_of_messages) != b"[":
            return self.list_of_messages
        if not self.single_prompt and not _is_single_prompt(body):
            return "prompt"
        for name in _OBJECTS:
            if name in body.members and body.begins(name) not in _AN_OBJECT:
                return name
        if body.begins("stream_options") == b"{" and body.get("stream") is not True:
            return "stream_options"
        return None

    def prefill_body(self, body: Body, transfer: bytes) -> Payload:
        """Return the body of the leg that computes the prompt: one token that only length ends."""
        limits = {name: b"1" for name in self.limits if name in body.members}
        own = {**_clean_extra(body), **limits}
        if not own:
            return body.cut(self._not_for_prefill, self._for_prefill + transfer)
        added = write_object(own) + b"," + self._for_prefill + transfer
        return body.cut(self._not_for_prefill.union(own), added)

    def decode_body(self, body: Body, transfer: bytes) -> Payload:
        """Return the body of the leg that answers: the client's own, and where its KV comes from."""
        extra = _clean_extra(body)
        if not extra:
            return body.cut(INTERNAL, _WRITTEN_TRANSFER + transfer)
        return body.spliced(without=INTERNAL, plus={**extra, _TRANSFER: transfer})

    def whole_body(self, body: Body) -> Payload:
        """Return the body for one engine that does both."""
        extra = _clean_extra(body)
        if not extra and not any(name in body for name in INTERNAL):
            return body.payload
        return body.spliced(without=INTERNAL, plus=extra)

    def prompt(self, body: Body) -> tuple[bytes, int, int]:
        """Return what shapes the prompt, as it was sent, and where in those bytes it begins and ends: equal bytes are
        equal prompts, but for what is far behind. To be asked before members of the body are replaced."""
        members = body.members
        fields = [name for name in self.prompt_fields if name in members]
        if len(fields) == 1:
            # Not copied: a prompt may be as large as a body, and both live as long as the request.
            begin, end = body.place(fields[0])
            return body.raw, begin, min(end, begin + _LONGEST_PROMPT)
        prompt = body.beginning(tuple(fields), _LONGEST_PROMPT)
        return prompt, 0, len(prompt)

    def error_body(self, error: ApiError) -> bytes:
        """Return the JSON document of an error, in the shape that this API's clients read."""
        return json.dumps(error.body()).encode()

    def error_event(self, error: ApiError, before: bytes) -> bytes:
        """Return the error as the last event of a stream. `before`: the end of what the client has."""
        return b"data: " + self.error_body(error) + b"\n\n"


class _Responses(Dialect):
    """Is OpenAI's Responses API: events have a type, errors among them."""

    def error_event(self, error: ApiError, before: bytes) -> bytes:
        numbers = _SEQUENCE.findall(before)
        event = {
            "type": "error",
            "code": error.type,
            "message": error.message,
            "param": error.param,
            "sequence_number": int(numbers[-1]) + 1 if numbers else 0,
        }
        return b"event: error\ndata: " + json.dumps(event).encode() + b"\n\n"


class _Messages(Dialect):
    """Is Anthropic's Messages API."""

    def error_body(self, error: ApiError) -> bytes:
        return json.dumps({"type": "error", "error": {"type": _anthropic(error), "message": error.message}}).encode()

    def error_event(self, error: ApiError, before: bytes) -> bytes:
        return b"event: error\ndata: " + self.error_body(error) + b"\n\n"


_SINGLE_TOKEN: Final = {"max_tokens": b"1", "stream": b"false", "ignore_eos": b"true"}

CHAT: Final = Dialect(
    "chat",
    "/v1/chat/completions",
    prompt_fields=("tools", "documents", "chat_template_kwargs", "messages"),
    prefill_fields=_SINGLE_TOKEN,
    limits=("max_completion_tokens",),
    end_of_stream=b"data: [DONE]",
    checks={"logprobs": _flag},
    list_of_messages="messages",
)
COMPLETIONS: Final = Dialect(
    "completions",
    "/v1/completions",
    prompt_fields=("prompt",),
    prefill_fields=_SINGLE_TOKEN,
    limits=("max_completion_tokens",),
    end_of_stream=b"data: [DONE]",
    checks={"logprobs": _count(0)},
    single_prompt=False,
)
RESPONSES: Final = _Responses(
    "responses",
    "/v1/responses",
    prompt_fields=("tools", "instructions", "input"),
    # store: no client will ask prefill for this answer.
    prefill_fields={"max_output_tokens": b"1", "stream": b"false", "ignore_eos": b"true", "store": b"false"},
)
MESSAGES: Final = _Messages(
    "messages",
    "/v1/messages",
    prompt_fields=("tools", "system", "messages"),
    # It has no ignore_eos. A token that ends the turn does not matter: the patch mooncake-requests keeps the KV of a
    # prefill that ends by stop, and NIXL does so itself.
    prefill_fields={"max_tokens": b"1", "stream": b"false"},
    end_of_stream=b"event: message_stop",
    list_of_messages="messages",
)
DIALECTS: Final = (CHAT, COMPLETIONS, RESPONSES, MESSAGES)


class _Whole(Dialect):
    """An API that one worker answers by itself."""

    def needs_single_engine(self, body: Body) -> str | None:
        return self.name


class _WholeMessages(_Messages):
    """Answers that come as a whole, in Anthropic's dialect. (No second base: mypyc knows none.)"""

    def needs_single_engine(self, body: Body) -> str | None:
        return self.name


_WHOLE_PATHS: Final = {
    "embeddings": ("/v1/embeddings",),
    "pooling": ("/pooling",),
    "classify": ("/classify",),
    "score": ("/score", "/v1/score"),
    "rerank": ("/rerank", "/v1/rerank", "/v2/rerank"),
    "tokenize": ("/tokenize",),
    "detokenize": ("/detokenize",),
    "generative_scoring": ("/generative_scoring",),
    # A list of chats with one set of parameters. A transfer brings the KV of one prompt.
    "batch": ("/v1/chat/completions/batch",),
    # SageMaker's: the engine finds out from the body which API is meant. Of those only chats and completions stream.
    "invocations": ("/invocations",),
}
WHOLE: Final = tuple(
    _Whole(
        name,
        path,
        # What vLLM computes on, whatever the API: admission counts it.
        prompt_fields=(*CHAT.prompt_fields, "system", "instructions", "input", "prompt", "text_1", "query", "items"),
        prefill_fields={},
        end_of_stream=b"data: [DONE]" if name == "invocations" else None,
    )
    for name, paths in _WHOLE_PATHS.items()
    for path in paths
)
COUNT_TOKENS: Final = _WholeMessages(
    "count_tokens", "/v1/messages/count_tokens", prompt_fields=("tools", "system", "messages"), prefill_fields={}
)
BY_PATH: Final = {dialect.path.encode(): dialect for dialect in (*DIALECTS, *WHOLE, COUNT_TOKENS)}
RETRIEVE: Final = _Responses("retrieve", "/v1/responses/{response_id}", prompt_fields=(), prefill_fields={})
CANCEL: Final = _Responses("cancel", "/v1/responses/{response_id}/cancel", prompt_fields=(), prefill_fields={})


def nearest_dialect(path: bytes) -> Dialect:
    """Return the API whose errors a client reads that asks for an unknown path."""
    return MESSAGES if path.startswith(b"/v1/messages/") else CHAT


def _is_single_prompt(body: Body) -> bool:
    first = body.begins("prompt")
    if first != b"[":
        return first == b'"'
    return body.has_single_or_plain_items("prompt")


def _clean_extra(body: Body) -> dict[str, bytes]:
    """Return vllm_xargs without internal names: vLLM merges it into the same mapping that carries kv_transfer_params to
    the connector."""
    raw = body.raw_value("vllm_xargs") if "vllm_xargs" in body.members else None
    if raw is None or not raw.startswith(b"{"):
        return {}
    extra = Body(raw)
    if not any(name in extra for name in INTERNAL):
        return {}
    return {"vllm_xargs": bytes(extra.spliced(without=INTERNAL, plus={}))}


def _anthropic(error: ApiError) -> str:
    names = {
        400: "invalid_request_error",
        401: "authentication_error",
        403: "permission_error",
        404: "not_found_error",
        413: "request_too_large",
        429: "rate_limit_error",
        503: "overloaded_error",
    }
    return names.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
