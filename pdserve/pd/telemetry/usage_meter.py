"""How many tokens a client was given, for a key that has a limit of tokens a minute.

An engine reports them at the end of a stream, and only when asked. So for such a key decode is asked to count in every
event (`stream_options`), and what the client did not ask for is taken out again: it gets the bytes that it would have
got. Who leaves in the middle is counted by the last event that was relayed. Responses and Messages always count at the
end; until then, and where an engine does not count, an event with text is at least one token, or one for 4 bytes.

vLLM puts `system_fingerprint` into the last event of each choice, unless an event with the usage follows, which has it
then. So the last event of a choice is held until the fingerprint of that engine is known, and gets it.

In a JSON text quotes inside a string have a backslash, so that nothing here ever matches what a model has written.
"""

from __future__ import annotations

import re
from typing import Any, Final

import msgspec
from pydantic import TypeAdapter, ValidationError

from pdserve.pd.errors import bad_request
from pdserve.pd.http import event_stream
from pdserve.pd.requests.body import Body, encode
from pdserve.pd.requests.dialects import CHAT, COMPLETIONS, Dialect
from pdserve.pd.telemetry.cached_tokens import USAGE
from pdserve.pd.telemetry.usage_counts import EventUsage, of_event, of_value

_USAGE: Final = re.compile(rb', ?"usage" ?: ?(\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\})')
_FINISHED: Final = re.compile(rb'"finish_reason" ?: ?"')
_FINGERPRINT: Final = re.compile(rb', ?"system_fingerprint" ?: ?"(?:[^"\\]|\\.)*"')
_HAS_TEXT: Final = re.compile(rb'\.delta"|"content_block_delta"|"choices"')
_TEXT: Final = re.compile(
    rb'("(?:delta|text|content|thinking|reasoning|reasoning_content|partial_json|arguments)" ?: ?")((?:[^"\\]|\\.)+)"'
)
_QUOTE: Final = b'"'
_BACKSLASH: Final = 0x5C
_BYTES_PER_TOKEN: Final = 4
_SHORT_TEXT: Final = 64
"""Less than any event has beside its text, and less than a usage: neither a second event nor a usage is in so much."""
_LONGEST_FLAG: Final = 64
_LONGEST_OPTIONS: Final = 1024
_MAX_HELD: Final = 1024 * 1024
_WINDOW: Final = 8192
"""Of the beginning of an answer's usage, at the end of one piece of it."""
_TRUE, _FALSE = msgspec.Raw(b"true"), msgspec.Raw(b"false")
_COUNTED: Final = b'{"include_usage":true,"continuous_usage_stats":true}'
_FLAG: TypeAdapter[bool | None] = TypeAdapter(bool | None)


class Fingerprints:
    """What workers call themselves in this life, as the member of an event."""

    def __init__(self) -> None:
        self.known: dict[str, bytes] = {}

    def forget(self, worker: str) -> None:
        """It may be another one when it is back."""
        self.known.pop(worker, None)


class UsageMeter:
    """Counts the tokens of one answer."""

    __slots__ = (
        "_after_text",
        "_before_text",
        "_by_choice",
        "_end_of_event",
        "_estimate",
        "_fingerprints",
        "_frame",
        "_held",
        "_hides",
        "_hides_total",
        "_total",
        "_window",
        "prompt",
        "worker",
    )

    def __init__(self, fingerprints: Fingerprints, *, hides: bool = False, hides_total: bool = False) -> None:
        """`hides`: the client did not ask for the counts in each event; `hides_total`: nor for the event with all."""
        self._fingerprints = fingerprints
        self._hides, self._hides_total = hides, hides_total
        self.worker = ""
        self.prompt: int | None = None
        """Tokens of the prompt, as the engine reports; None: it has not."""
        self._total: int | None = None
        self._by_choice: dict[int, int] = {}
        self._estimate = 0
        self._before_text = b""
        """What stood before a text: it is looked for first."""
        self._after_text = b""
        """What stood behind the only text of an event, to its end."""
        self._end_of_event = b""
        """The same without the blank line."""
        self._frame = 0
        """Bytes of that event beside its text; 0: not known."""
        self._held: list[bytes | None] = []
        """None is the place of a fingerprint."""
        self._window = b""

    @property
    def answer(self) -> int | None:
        """Tokens that the client was given; None: nothing is known of any."""
        if self._total is not None:
            return self._total
        return max(sum(self._by_choice.values()), self._estimate) or None

    def part(self, data: bytes) -> None:
        """A part of an answer that is no stream and too large to be looked at as a whole. Which `usage` is the engine's
        own is not known then, so the largest counts: no client can write itself a smaller one."""
        window = self._window + data
        self._raise_to(*most_in(window))
        self._window = window[-_WINDOW:]

    def events(self, data: bytes) -> bytes:
        """What the client gets of whole events, or of a part of a very large one."""
        *events, last = data.split(event_stream.END)
        given = [self._event(event, event_stream.END) for event in events]
        if last:
            given.append(self._event(last, b""))
        return b"".join(given)

    def took(self, data: bytes) -> bool:
        """Whether each event in this is like the one before it, but for its text. Then they are counted, go on as they
        are, and need not be looked at: nearly all events of a stream are so."""
        frame = self._frame
        text = len(data) - frame
        if text <= 0 or not frame or self._held or not data.endswith(self._after_text):
            return False
        if text < _SHORT_TEXT:
            self._estimate += max(1, text // _BYTES_PER_TOKEN)
            return True
        # Several that came in one read, as they do under load.
        frame, tokens, end = frame - len(event_stream.END), 0, self._end_of_event
        for event in data.split(event_stream.END)[:-1]:
            text = len(event) - frame
            if text <= 0 or text >= _SHORT_TEXT or not event.endswith(end):
                return False
            tokens += max(1, text // _BYTES_PER_TOKEN)
        self._estimate += tokens
        return True

    def without_usage(self, data: bytes) -> bytes:
        """The same for events that have none."""
        self._estimated(data)
        return data if not self._held else self._released(b"") + data

    def rest(self) -> bytes:
        """What is held: nothing more will come."""
        return self._released(b"")

    def _event(self, event: bytes, end: bytes) -> bytes:
        at = event.rfind(USAGE)
        if at < 0:
            return self._without(event + end)
        usage = of_event(event)
        if usage is None:
            self._raise_to(*most_in(event))
            return self._released(b"") + event + end
        if usage.prompt is None and usage.answer is None:
            return self._without(event + end)
        if usage.choice is None:
            return self._with_all(event + end, usage)
        if usage.prompt is not None:
            # Of one of several prompts, until the event with all: who leaves before that has used so much at least.
            self.prompt = max(usage.prompt, self.prompt or 0)
        self._by_choice[usage.choice] = max(usage.answer or 0, self._by_choice.get(usage.choice, 0))
        if not self._hides or (match := _own_usage(event, at)) is None:
            return event + end
        before, after = event[: match.start()], event[match.end() :] + end
        if self._hides_total and _FINISHED.search(event) is not None:
            fingerprint = self._fingerprints.known.get(self.worker)
            if fingerprint is None or self._held:
                return self._hold(before, None, after)
            return before + fingerprint + after
        return self._hold(before + after) if self._held else before + after

    def _without(self, event: bytes) -> bytes:
        """An event without a usage."""
        self._estimated(event)
        return self._released(b"") + event

    def _with_all(self, event: bytes, usage: EventUsage) -> bytes:
        """The event that has the usage of the whole answer; of Messages also the first one, which has the prompt's."""
        if usage.prompt is not None:
            self.prompt = usage.prompt
        if not usage.first:
            self._total = usage.answer or 0
        if not self._hides_total:
            return event
        match = _FINGERPRINT.search(event)
        fingerprint = b"" if match is None else match[0]
        self._fingerprints.known[self.worker] = fingerprint
        return self._released(fingerprint)

    def _raise_to(self, prompt: int | None, answer: int | None) -> None:
        if prompt is not None:
            self.prompt = max(prompt, self.prompt or 0)
        if answer is not None:
            self._total = max(answer, self._total or 0)

    def _estimated(self, data: bytes) -> None:
        """Of events without counts."""
        before = self._before_text
        at = data.find(before) if before else -1
        if at < 0:
            self._estimated_anywhere(data)
            return
        self._frame = 0
        last_event = data.rfind(event_stream.END, 0, len(data) - len(event_stream.END))
        last_event = last_event + len(event_stream.END) if last_event >= 0 else 0
        texts_of_last = 0
        while at >= 0:
            begin = at + len(before)
            end = data.find(_QUOTE, begin)
            if end < 0 or data[end - 1] == _BACKSLASH:
                self._frame = 0
                for event in data[at:].split(event_stream.END):
                    self._add_texts(event)
                return
            if end > begin:
                self._estimate += max(1, (end - begin) // _BYTES_PER_TOKEN)
                if at >= last_event:
                    texts_of_last += 1
                    self._after_text, self._end_of_event = data[end:], data[end : -len(event_stream.END)]
                    self._frame = len(data) - last_event - (end - begin)
            at = data.find(before, end)
        if texts_of_last != 1 or not data.endswith(event_stream.END):
            self._frame = 0

    def _estimated_anywhere(self, data: bytes) -> None:
        for event in data.split(event_stream.END):
            if _HAS_TEXT.search(event) is not None:
                self._add_texts(event)

    def _add_texts(self, data: bytes) -> None:
        texts = _TEXT.findall(data)
        if texts:
            self._estimate += max(1, sum([len(text) for _, text in texts]) // _BYTES_PER_TOKEN)
            self._before_text = texts[-1][0]

    def _hold(self, *pieces: bytes | None) -> bytes:
        self._held.extend(pieces)
        return b"" if sum([len(piece) for piece in self._held if piece is not None]) < _MAX_HELD else self.rest()

    def _released(self, fingerprint: bytes) -> bytes:
        if not self._held:
            return b""
        held, self._held = self._held, []
        return b"".join([fingerprint if piece is None else piece for piece in held])


def metered(dialect: Dialect, body: Body, fingerprints: Fingerprints) -> tuple[Body, UsageMeter]:
    """The request as decode gets it, and the meter of its answer. ApiError 400: its options cannot be read."""
    members = body.members
    stream = members.get("stream")
    if stream is None or stream == _FALSE:
        return body, UsageMeter(fingerprints)
    if stream == _TRUE and "stream_options" not in members and dialect in (CHAT, COMPLETIONS):
        return body.replaced("stream_options", _COUNTED), UsageMeter(fingerprints, hides=True, hides_total=True)
    if dialect not in (CHAT, COMPLETIONS) or body.length("stream") > _LONGEST_FLAG:
        # It counts by itself; no engine takes such a flag.
        return body, UsageMeter(fingerprints)
    if body.length("stream_options") > _LONGEST_OPTIONS:
        # An engine may take it. It is not looked at here, as it may be as large as a body, and must not go uncounted.
        raise bad_request(f"stream_options is longer than {_LONGEST_OPTIONS} bytes.", "stream_options")
    options = body.get("stream_options")
    if not _flag(body.get("stream")) or not isinstance(options, dict | None):
        return body, UsageMeter(fingerprints)
    asked: dict[str, Any] = options or {}
    usage = _flag(asked.get("include_usage"))
    continuous = usage and _flag(asked.get("continuous_usage_stats"))
    if usage is None or continuous is None:
        # No engine takes that.
        return body, UsageMeter(fingerprints)
    wanted = encode({**asked, "include_usage": True, "continuous_usage_stats": True})
    return body.replaced("stream_options", wanted), UsageMeter(
        fingerprints, hides=not continuous, hides_total=not usage
    )


def most_in(data: bytes) -> tuple[int | None, int | None]:
    """The most tokens of prompt and answer in any `usage` of a part of an answer; None: there is none."""
    counts = [of_value(match[1]) for match in _USAGE.finditer(data)]
    prompts = [prompt for prompt, _ in counts if prompt is not None]
    answers = [answer for _, answer in counts if answer is not None]
    return max(prompts, default=None), max(answers, default=None)


def last_in(words: bytes, *, stream: bool) -> tuple[int | None, int | None]:
    """Tokens of prompt and answer, as the end of an answer reports them; None: it does not. Of an event or an answer of
    which only the end is left, the last `usage` counts: the engine's stands behind what it repeats of a request."""
    at = len(words) if stream else 0
    while (at := words.rfind(USAGE, 0, at)) >= 0:
        begin, end = words.rfind(event_stream.END, 0, at), words.find(event_stream.END, at)
        usage = of_event(words[max(0, begin) : end if end >= 0 else len(words)])
        if usage is not None and (usage.prompt is not None or usage.answer is not None):
            return usage.prompt, usage.answer
        at = max(0, begin)
    last = [of_value(match[1]) for match in _USAGE.finditer(words[-_WINDOW:])][-1:]
    return last[0] if last else (None, None)


def _own_usage(event: bytes, at: int) -> re.Match[bytes] | None:
    """The engine's member of an event, which is its last; `at`: of the last time that the word is there."""
    while at >= 0:
        if (match := _USAGE.search(event, max(0, at - 2))) is not None:
            return match
        at = event.rfind(USAGE, 0, at)
    return None


def _flag(value: Any) -> bool | None:
    """As engines read one: 1 and "on" are true. None: it is none."""
    try:
        return _FLAG.validate_python(value) or False
    except ValidationError:
        return None
