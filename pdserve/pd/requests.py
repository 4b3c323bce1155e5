"""What a client may ask for, and the bodies of the two legs that its request becomes.

Both legs must tokenise to the same prompt, so whatever can shape the prompt stays in the prefill leg: messages,
tools, tool_choice and response_format too (the renderers of Kimi-K3 and Cohere put them into the prompt), templates,
truncation, cache_salt, media. What goes is what would end the one token other than by length, multiply it, or is
only about the answer. Sampling constraints (grammars, biases) stay: with ignore_eos they cannot end a request.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pdserve.pd.errors import bad_request

Body = dict[str, Any]
Kind = Literal["chat", "completions"]

PATHS: dict[Kind, str] = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}

INTERNAL = ("kv_transfer_params", "ec_transfer_params")
"""Between proxy and engines only. From a client they point decode at any address or end an EngineCore."""

NOT_FOR_PREFILL = frozenset(
    (
        # They end the token by "stop": Mooncake then drops the KV and decode waits for its whole timeout.
        *("stop", "stop_token_ids", "min_tokens"),
        # They multiply the sequences; only one of them can own the transfer.
        *("n", "best_of", "use_beam_search"),
        # They are about the answer, which nobody reads here; some are invalid without the client's own max_tokens.
        *("stream_options", "stream_interval", "echo", "logprobs", "top_logprobs", "prompt_logprobs"),
        *("logprob_token_ids", "return_token_ids", "return_tokens_as_token_ids", "return_prompt_text"),
        "return_mm_kwargs",
    )
)

FLAGS = (
    *("ignore_eos", "echo", "return_token_ids", "return_tokens_as_token_ids"),
    *("return_prompt_text", "return_mm_kwargs"),
)


@dataclass(frozen=True)
class ClientRequest:
    """A request that may be sent on: its body without internal fields, and the headers that the engines get."""

    kind: Kind
    body: Body
    request_id: str
    headers: Mapping[str, str]

    @property
    def path(self) -> str:
        return PATHS[self.kind]


def parse(raw: bytes) -> Body:
    """The JSON object of a request, without internal fields however their names were escaped. 400 otherwise."""
    try:
        body = json.loads(raw, parse_constant=_no_constant)
    except RecursionError:
        raise bad_request("The request body is nested too deeply.") from None
    except ValueError as error:
        raise bad_request(f"The request body is not valid JSON: {error}") from None
    if not isinstance(body, dict):
        raise bad_request("The request body must be a JSON object.")
    for name in INTERNAL:
        body.pop(name, None)
    extra = body.get("vllm_xargs")
    if isinstance(extra, dict):
        # vLLM merges these into the same mapping that carries kv_transfer_params to the connector.
        body["vllm_xargs"] = {name: value for name, value in extra.items() if name not in INTERNAL}
    return body


def check(kind: Kind, body: Body) -> None:
    """What every mode needs of a body."""
    _check(body, "stream", isinstance(body.get("stream"), bool | None), "must be a boolean")
    if kind == "chat":
        _check(body, "messages", isinstance(body.get("messages"), list), "must be a list of messages")


def check_disaggregated(kind: Kind, body: Body) -> None:
    """Refuse what one prefill and one decode leg cannot answer as a single engine would.

    The types of the fields that the prefill leg does not get are checked here: if decode alone refused them, prefill
    would keep the KV of a request that nobody continues until its abort timeout.
    """
    for name in ("n", "best_of"):
        _check(body, name, _is(body.get(name), 1), "must be 1 in prefill/decode mode: one transfer feeds one sequence")
    _check(body, "use_beam_search", _is(body.get("use_beam_search"), False), "is not possible in prefill/decode mode")
    _check(
        body,
        "prompt_logprobs",
        body.get("prompt_logprobs") is None,
        "is not possible in prefill/decode mode: decode does not compute the prompt",
    )
    if not _is(body.get("echo"), False):
        plain = all(_is(body.get(name), False) for name in ("logprobs", "top_logprobs"))
        _check(body, "echo", plain, "with logprobs is not possible in prefill/decode mode")
    _check(
        body,
        "truncate_prompt_tokens",
        _is_count(body.get("truncate_prompt_tokens"), least=0),
        "must be a number of tokens in prefill/decode mode: -1 would cut the prompt differently on the two engines",
    )
    if kind == "completions":
        _check_prompt(body)
    _check_types(kind, body)


def prefill_body(body: Body, transfer: Body) -> Body:
    """The leg that computes the prompt: one token that is always ended by length."""
    leg = {name: value for name, value in body.items() if name not in NOT_FOR_PREFILL}
    leg |= {"max_tokens": 1, "stream": False, "ignore_eos": True, "kv_transfer_params": transfer}
    if "max_completion_tokens" in body:
        leg["max_completion_tokens"] = 1
    return leg


def decode_body(body: Body, transfer: Body) -> Body:
    """The leg that answers: the client's own body, and where its KV comes from."""
    return body | {"kv_transfer_params": transfer}


def encode(body: Body) -> bytes:
    try:
        return json.dumps(body, allow_nan=False, separators=(",", ":")).encode()
    except ValueError:
        # A literal like 1e999 is valid JSON but has no finite value.
        raise bad_request("The request body holds a number that is out of range.") from None


def _check_prompt(body: Body) -> None:
    prompt = body.get("prompt")
    _check(body, "prompt_embeds", body.get("prompt_embeds") is None, "is not possible in prefill/decode mode")
    if isinstance(prompt, list):
        one = len(prompt) == 1 or all(isinstance(token, int) for token in prompt)
        _check(body, "prompt", bool(prompt), "must not be empty")
        _check(body, "prompt", one, "must be one prompt in prefill/decode mode; send one request for each")
    else:
        _check(body, "prompt", isinstance(prompt, str), "must be a string or a list of token ids")


def _check_types(kind: Kind, body: Body) -> None:
    for name in ("max_tokens", "max_completion_tokens"):
        _check(body, name, _is_count(body.get(name), least=1), "must be a positive integer")
    _check(body, "stream_interval", _is_count(body.get("stream_interval"), least=1), "must be a positive integer")
    for name in ("min_tokens", "top_logprobs"):
        _check(body, name, _is_count(body.get(name), least=0), "must be a non-negative integer")
    for name in FLAGS:
        _check(body, name, isinstance(body.get(name), bool | None), "must be a boolean")
    for name in ("stop_token_ids", "logprob_token_ids"):
        _check(body, name, body.get(name) is None or _is_list(body[name], int), "must be a list of token ids")
    logprobs = body.get("logprobs")
    valid = isinstance(logprobs, bool | None) if kind == "chat" else _is_count(logprobs, least=0)
    _check(body, "logprobs", valid, "must be a boolean" if kind == "chat" else "must be a non-negative integer")
    if kind == "chat" and body.get("top_logprobs"):
        _check(body, "top_logprobs", logprobs is True, "needs logprobs to be true")
    stop, options = body.get("stop"), body.get("stream_options")
    _check(body, "stop", isinstance(stop, str | None) or _is_list(stop, str), "must be a string or a list of strings")
    _check(body, "stream_options", isinstance(options, dict | None), "must be an object")
    if options is not None:
        _check(body, "stream_options", body.get("stream") is True, "needs stream to be true")
        flags = all(isinstance(value, bool | None) for value in options.values())
        _check(body, "stream_options", flags, "holds booleans only")


def _check(body: Body, name: str, valid: bool, rule: str) -> None:
    if not valid:
        raise bad_request(f"{name} {rule}.", param=name)


def _is(value: Any, only: object) -> bool:
    """None, or exactly that value: 1 and True are not the same here, "1" is refused rather than coerced."""
    return value is None or (type(value) is type(only) and value == only)


def _is_count(value: Any, *, least: int) -> bool:
    return value is None or (type(value) is int and value >= least)


def _is_list(value: Any, of: type) -> bool:
    return isinstance(value, list) and all(type(item) is of for item in value)


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")
