"""What a client reports of each request, whichever client it is. Times in seconds of CLOCK_MONOTONIC."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class RequestRecord:
    """A request of the measured window."""

    started: float
    ok: bool
    prompt_tokens: int
    """As the server counted them."""
    output_tokens: int
    """The same."""
    ttft: float
    gaps: tuple[float, ...]
    """Between two chunks of the answer. A chunk can hold several tokens."""
    e2e: float
    error: str = ""
    asked_output: int | None = None
    """Tokens that this answer was asked for, where each has a length of its own (a trace)."""
    cut: bool = False
    """It was open when the time of the load was over: neither answered nor failed."""

    @property
    def ended(self) -> float:
        return self.started + self.e2e

    @property
    def tpot(self) -> float | None:
        """Mean time of a token after the first; None for an answer of a single token."""
        return (self.e2e - self.ttft) / (self.output_tokens - 1) if self.output_tokens > 1 else None


class UnreadableResultError(ValueError):
    """The file is no result of this client, or is not whole."""


def of_vllm(text: str) -> tuple[RequestRecord, ...]:
    """The records in a file that `vllm bench serve --save-detailed` wrote. Raises UnreadableResultError.

    The client does not write whether a request succeeded. A failed request has an error or no token: an
    HTTP error without a reason phrase has an empty error text.
    """
    try:
        raw: dict[str, Any] = json.loads(text)
        rows = zip(
            raw["start_times"],
            raw["input_lens"],
            raw["output_lens"],
            raw["ttfts"],
            raw["itls"],
            raw["latencies"],
            raw["errors"],
            strict=True,
        )
        return tuple(
            possible(
                RequestRecord(
                    started=float(started),
                    ok=not error and int(output) > 0,
                    prompt_tokens=int(prompt),
                    output_tokens=int(output),
                    ttft=float(ttft),
                    gaps=tuple(map(float, gaps)),
                    e2e=float(e2e),
                    error=last_line(str(error)),
                )
            )
            for started, prompt, output, ttft, gaps, e2e, error in rows
        )
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise UnreadableResultError(f"{type(error).__name__}: {error}") from error


def possible(record: RequestRecord) -> RequestRecord:
    """Itself. Raises ValueError where a number of it can be none: JSON of Python may hold NaN and Infinity."""
    took = {"ttft": record.ttft, "e2e": record.e2e, **{f"gap {n}": gap for n, gap in enumerate(record.gaps)}}
    lengths = {"prompt_tokens": record.prompt_tokens, "output_tokens": record.output_tokens}
    for name, value in {**took, **lengths}.items():
        if not math.isfinite(value) or value < 0:
            raise ValueError(f"{name} is {value}")
    if not math.isfinite(record.started):
        raise ValueError(f"started is {record.started}")
    return record


def last_line(text: str) -> str:
    """Of a traceback, the exception. Half a surrogate pair, which JSON lets through and no file takes, is escaped."""
    lines = text.strip().splitlines()
    return lines[-1].encode(errors="backslashreplace").decode() if lines else ""
