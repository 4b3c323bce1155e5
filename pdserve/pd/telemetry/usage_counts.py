"""The counts in an answer's `usage`, as each API calls them. Not compiled: msgspec reads its annotations.

Only the engine's own `usage` counts, which stands at the top of an answer or an event, or in the `response` or
`message` of an event: answers repeat what a client has sent (tools, messages), in which it may write what it likes.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
"""What is no number of tokens is none at all: a sum of them stays an exact double."""


class UsageFields(msgspec.Struct):
    """Counts of a usage; None: the engine did not report it. Anthropic's input_tokens are those that no cache had."""

    prompt_tokens: _Count | None = None
    completion_tokens: _Count | None = None
    input_tokens: _Count | None = None
    output_tokens: _Count | None = None
    cache_read_input_tokens: _Count | None = None
    cache_creation_input_tokens: _Count | None = None

    def tokens(self) -> tuple[int | None, int | None]:
        """Return the tokens of prompt and answer; None: not reported."""
        prompt = self.prompt_tokens
        if prompt is None and self.input_tokens is not None:
            cached = (self.cache_read_input_tokens or 0) + (self.cache_creation_input_tokens or 0)
            prompt = self.input_tokens + cached
        return prompt, self.output_tokens if self.completion_tokens is None else self.completion_tokens


class _Answer(msgspec.Struct):
    usage: UsageFields | None = None


class _Event(msgspec.Struct):
    usage: UsageFields | None = None
    response: _Answer | None = None
    """The answer, in an event of Responses."""
    message: _Answer | None = None
    """The answer, in the first event of Messages."""


class _Details(msgspec.Struct):
    cached_tokens: _Count | None = None


class _Cached(msgspec.Struct):
    prompt_tokens_details: _Details | None = None
    input_tokens_details: _Details | None = None
    """The details that Responses has."""
    cache_read_input_tokens: _Count | None = None
    """The cached tokens, as Messages has them."""


class _CachedAnswer(msgspec.Struct):
    usage: _Cached | None = None


_VALUE = msgspec.json.Decoder(UsageFields)
_WHOLE = msgspec.json.Decoder(_Answer)
_EVENT = msgspec.json.Decoder(_Event)
_CACHED = msgspec.json.Decoder(_CachedAnswer)
_NOTHING = (None, None)


def of_value(usage: bytes) -> tuple[int | None, int | None]:
    """Return the tokens of prompt and answer in the value of a `usage`; None, None: it is none."""
    try:
        counts = _VALUE.decode(usage)
    except (msgspec.MsgspecError, RecursionError):
        return _NOTHING
    return counts.tokens()


def of_answer(answer: bytes) -> tuple[int | None, int | None]:
    """Return the tokens of prompt and answer that a whole answer, no stream, reports; None: it does not."""
    try:
        counts = _WHOLE.decode(answer).usage
    except (msgspec.MsgspecError, RecursionError):
        return _NOTHING
    return _NOTHING if counts is None else counts.tokens()


def cached_in(answer: bytes) -> int | None:
    """Return the tokens of the prompt that were in a cache, as a whole answer, no stream, reports them; None: it does
    not."""
    try:
        usage = _CACHED.decode(answer).usage
    except (msgspec.MsgspecError, RecursionError):
        return None
    if usage is None:
        return None
    details = usage.prompt_tokens_details if usage.input_tokens_details is None else usage.input_tokens_details
    return usage.cache_read_input_tokens if details is None else details.cached_tokens


def of_event(event: bytes) -> tuple[int | None, int | None]:
    """Return the tokens of prompt and answer that one event of a stream reports; None: it does not, or is not a whole
    one."""
    try:
        decoded = _EVENT.decode(event[max(0, event.find(b"{")) :])
    except (msgspec.MsgspecError, RecursionError):
        return _NOTHING
    inner = decoded.response if decoded.response is not None else decoded.message
    counts = decoded.usage if decoded.usage is not None or inner is None else inner.usage
    return _NOTHING if counts is None else counts.tokens()
