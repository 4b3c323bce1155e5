"""AIPerf's record of each request (profile_export.jsonl), read into ours."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pdserve.bench.records import RequestRecord, UnreadableResultError, last_line, possible
from pdserve.bench.snapshot import Clocks

_NANOSECONDS, _MILLISECONDS = 1e9, 1e3
_CANCELLED = re.compile(r"Phase profiling .*complete \| completed=\d+, cancelled=(\d+)")


def of_aiperf(
    text: str, clocks: Clocks, asked: Mapping[tuple[str, int], int] | None = None
) -> tuple[RequestRecord, ...]:
    """Of the measured phase, in the order in which they were sent. `clocks`: of one moment, because AIPerf has the wall
    clock. `asked`: the length of each answer by session and turn. Raises UnreadableResultError.

    A stream that ended early has no error: the count of its tokens gives it away.
    """
    records = []
    # Not splitlines: JSON may hold U+2028 and U+0085 as they are.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            raw: dict[str, Any] = json.loads(line)
            if raw["metadata"]["benchmark_phase"] == "profiling":
                records.append(possible(_record(raw, clocks, asked)))
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            raise UnreadableResultError(f"line {number}: {type(error).__name__}: {error}") from error
    return tuple(sorted(records, key=lambda record: record.started))


def cut_records(log: str, records: Sequence[RequestRecord]) -> tuple[RequestRecord, ...]:
    """Requests that were open when the time was over. AIPerf keeps no record of them, only their number in its log."""
    counts = _CANCELLED.findall(log)
    ended = max((record.ended for record in records), default=0.0)
    one = RequestRecord(started=ended, ok=False, prompt_tokens=0, output_tokens=0, ttft=0.0, gaps=(), e2e=0.0, cut=True)
    return (one,) * (int(counts[-1]) if counts else 0)


def _record(raw: Mapping[str, Any], clocks: Clocks, asked: Mapping[tuple[str, int], int] | None) -> RequestRecord:
    about, metrics = raw["metadata"], raw.get("metrics") or {}
    error = _error(raw.get("error"))
    output = int(_value(metrics, "usage_completion_tokens", "output_sequence_length"))
    started = about["request_start_ns"] / _NANOSECONDS - clocks.wall + clocks.monotonic
    took = (about["request_end_ns"] - about["request_start_ns"]) / _NANOSECONDS
    wanted = None if asked is None else asked.get((about.get("conversation_id"), about.get("turn_index")))
    return RequestRecord(
        started=started,
        # Without a first token there is no time to it, which would be 0 and keep any SLO.
        ok=not error and output > 0 and not about["was_cancelled"] and "time_to_first_token" in metrics,
        prompt_tokens=int(_value(metrics, "usage_prompt_tokens", "input_sequence_length")),
        output_tokens=output,
        ttft=_value(metrics, "time_to_first_token") / _MILLISECONDS,
        gaps=tuple(gap / _MILLISECONDS for gap in _values(metrics, "inter_chunk_latency")),
        e2e=_value(metrics, "request_latency") / _MILLISECONDS if "request_latency" in metrics else took,
        error=error,
        asked_output=wanted,
        cut=bool(about["was_cancelled"]),
    )


def _error(error: Any) -> str:
    """Its last line, with the code that the server gave."""
    if not error:
        return ""
    if not isinstance(error, Mapping):
        return last_line(str(error))
    parts = (error.get("code"), error.get("type"), error.get("message"))
    return " ".join(last_line(str(part)) for part in parts if part) or "error"


def _value(metrics: Mapping[str, Any], *names: str) -> float:
    """Of the first that is there; 0: none is."""
    return next((float(metrics[name]["value"]) for name in names if name in metrics), 0.0)


def _values(metrics: Mapping[str, Any], name: str) -> Iterator[float]:
    for value in metrics.get(name, {}).get("value", ()):
        yield float(value)
