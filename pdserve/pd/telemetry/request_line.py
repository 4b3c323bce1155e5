"""Define the fields of a request's line in the log. Not compiled: msgspec reads its annotations."""

from __future__ import annotations

from typing import Literal

import msgspec

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
