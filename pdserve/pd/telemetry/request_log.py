"""One line for each request: who, what, where, how long, and how it ended. Never a prompt, an answer or a key.

Lines are collected and written together every now and then: a system call for each request would cost more than the
line.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import lru_cache
from typing import Final, Literal

import msgspec

from pdserve.pd.config.settings import LogFormat

Outcome = Literal["ok", "error", "cancelled", "rejected"]


class RequestLine(msgspec.Struct, omit_defaults=True):
    """The fields of one request, in this order. Times are milliseconds; what is not known is left out."""

    request_id: str
    path: str
    status: int
    """The status of the HTTP answer; 499 when the client left before it."""
    outcome: Outcome
    time: str = ""
    """UTC, set when the line is made."""
    key: str = ""
    """The name of the API key."""
    model: str = ""
    decision: str = ""
    """Which way the request took, and why."""
    prefill: str = ""
    decode: str = ""
    """Names of the workers of the last attempt."""
    attempts: int = 0
    stream: bool = False
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    queue_ms: float | None = None
    prefill_ms: float | None = None
    kv_transfer_ms: float | None = None
    ttft_ms: float | None = None
    total_ms: float | None = None
    chunks: int = 0
    bytes: int = 0
    error: str = ""
    """The message of the error that the client got."""


FLUSH_SECONDS: Final = 0.25
_FLUSH_BYTES: Final = 32_768
_MAX_TEXT: Final = 256
_MILLISECONDS: Final = tuple(f".{part:03d}Z" for part in range(1000))
"""The end of a time. To format a number takes longer than the rest of a line's time."""
_PLAIN: Final = re.compile(r"[!#-<>-\[\]-~]+")
"""Text that needs no quotes: printable ASCII without blank, quote, equals sign and backslash."""


class RequestLog:
    """Belongs to one event loop. `write` gets whole lines."""

    def __init__(
        self, write: Callable[[bytes], object], form: LogFormat, *, now: Callable[[], float] = time.time
    ) -> None:
        """`now`: seconds since 1970."""
        self._write = write
        self._now = now
        self._render = _json if form == "json" else _text
        self._lines: list[bytes] = []
        self._bytes = 0
        self._second = 0
        self._written = ""
        """That second as it stands in a line."""
        self._timer: asyncio.TimerHandle | None = None

    def add(self, line: RequestLine) -> None:
        """The line is written within FLUSH_SECONDS."""
        now = self._now()
        second = int(now)
        if second != self._second or not self._written:
            self._second = second
            self._written = datetime.fromtimestamp(second, UTC).strftime("%Y-%m-%dT%H:%M:%S")
        line.time = self._written + _MILLISECONDS[int((now - second) * 1000)]
        # What a client chooses must not fill the disk.
        if line.model or line.error:
            line.model = line.model[:_MAX_TEXT]
            line.error = line.error[:_MAX_TEXT]
        rendered = self._render(line)
        self._lines.append(rendered)
        self._bytes += len(rendered)
        if self._bytes >= _FLUSH_BYTES:
            self.flush()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(FLUSH_SECONDS, self.flush)

    def flush(self) -> None:
        """Write what there is; also at the end of the process."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._lines:
            lines = b"".join(self._lines)
            self._lines.clear()
            self._bytes = 0
            self._write(lines)


_ENCODER: Final = msgspec.json.Encoder()


def _json(line: RequestLine) -> bytes:
    return _ENCODER.encode(line) + b"\n"


def _text(line: RequestLine) -> bytes:
    """time outcome status path, then key=value as in JSON."""
    words = [line.time, line.outcome, str(line.status), _known(line.path), f"id={_word(line.request_id)}"]
    for name, default in _REST:
        value = getattr(line, name)
        if value == default:
            continue
        if value.__class__ is str:
            words.append(f"{name}={_known(value) if name in _REPEATED else _word(value)}")
        else:
            words.append(f"{name}={'true' if value is True else value}")
    return " ".join(words).encode() + b"\n"


_REST: Final = [
    (field.name, field.default)
    for field in msgspec.structs.fields(RequestLine)
    if field.name not in ("request_id", "path", "status", "outcome", "time")
]


_REPEATED: Final = frozenset(("key", "model", "decision", "prefill", "decode"))


@lru_cache(maxsize=1024)
def _known(text: str) -> str:
    """`_word` of what many lines have in common."""
    return _word(text)


def _word(text: str) -> str:
    """One word on one line, whatever a client has written."""
    return text if _PLAIN.fullmatch(text) else json.dumps(text).replace("\x7f", "\\u007f")
