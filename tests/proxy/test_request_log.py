"""One line a request, readable by people or machines, whatever clients put into it."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.pd.config.settings import LogFormat
from pdserve.pd.telemetry.metrics import Histogram
from pdserve.pd.telemetry.request_line import RequestLine
from pdserve.pd.telemetry.request_log import RequestLog
from tests.proxy.rows import each

NOON = datetime(2026, 5, 4, 12, 0, 0, 123456, tzinfo=UTC)


def written(form: LogFormat, *lines: RequestLine) -> bytes:
    async def log() -> bytes:
        out: list[bytes] = []
        requests = RequestLog(out.append, form, now=NOON.timestamp)
        for line in lines:
            requests.add(line)
        requests.flush()
        return b"".join(out)

    return asyncio.run(log())


def line(**more: Any) -> RequestLine:
    values: dict[str, Any] = {"request_id": "r-1", "path": "/v1/completions", "status": 200, "outcome": "ok"}
    return RequestLine(**values | more)


FULL: dict[str, Any] = {
    "key": "team-a",
    "model": "tiny",
    "decision": "disaggregated",
    "prefill": "prefill-1",
    "decode": "decode-0",
    "attempts": 1,
    "stream": True,
    "prompt_tokens": 12,
    "cached_tokens": 0,
    "ttft_ms": 12.5,
    "chunks": 3,
}


def test_json_has_what_is_known_and_nothing_else() -> None:
    assert json.loads(written("json", line(**FULL))) == {
        "request_id": "r-1",
        "path": "/v1/completions",
        "status": 200,
        "outcome": "ok",
        "time": "2026-05-04T12:00:00.123Z",
        **FULL,
    }


def test_text_is_the_same_for_people() -> None:
    assert written("text", line(**FULL)).decode() == (
        "2026-05-04T12:00:00.123Z ok 200 /v1/completions id=r-1 key=team-a model=tiny decision=disaggregated "
        "prefill=prefill-1 decode=decode-0 attempts=1 stream=true prompt_tokens=12 cached_tokens=0 ttft_ms=12.5 "
        "chunks=3\n"
    )


@pytest.mark.parametrize("form", ["text", "json"])
@given(model=st.text(max_size=40), error=st.text(max_size=40), request_id=st.text(max_size=40))
def test_no_client_can_write_a_second_line_or_another_field(
    form: LogFormat, model: str, error: str, request_id: str
) -> None:
    out = written(form, line(model=model, error=error, request_id=request_id, path="/v1/x y=1"))
    assert out.count(b"\n") == 1
    assert out.endswith(b"\n")
    assert not set(out[:-1]) & {*range(32)}
    if form == "json":
        entry = json.loads(out)
        assert entry.get("model", "") == model
        assert entry.get("error", "") == error
        assert entry["path"] == "/v1/x y=1"
    else:
        assert b' 200 "/v1/x y=1" id=' in out
        # Nothing that a terminal could take for a command either.
        assert all(32 <= byte < 127 for byte in out[:-1])


def test_what_clients_choose_cannot_fill_the_disk() -> None:
    assert len(written("json", line(model="m" * 1_000_000, error="e" * 1_000_000))) < 1000


def test_lines_are_written_together_and_none_waits_for_ever() -> None:
    async def log() -> None:
        out: list[bytes] = []
        done = asyncio.Event()

        def write(lines: bytes) -> None:
            out.append(lines)
            done.set()

        requests = RequestLog(write, "json")
        requests.add(line())
        requests.add(line())
        assert out == []
        await asyncio.wait_for(done.wait(), 60)
        assert [block.count(b"\n") for block in out] == [2]
        for _ in range(1000):
            requests.add(line())
        assert len(out) > 1, "many lines do not wait for the timer"
        requests.flush()
        requests.flush()
        assert sum(block.count(b"\n") for block in out) == 1002

    asyncio.run(log())


@each("seconds, expected", [(0.25, 250.0), (0.0123456, 12.35), (0.0, 0.0), (-1.0, 0.0)])
def test_times_are_milliseconds_with_two_digits(seconds: float, expected: float) -> None:
    assert Histogram((1,)).timed(seconds) == expected


@each("seconds, expected", [(0.0, "00.000"), (59.9999, "59.999"), (1.0005, "01.000")])
def test_the_time_of_day_is_cut_not_rounded_up(seconds: float, expected: str) -> None:
    out: list[bytes] = []

    async def log() -> None:
        requests = RequestLog(out.append, "json", now=lambda: seconds)
        requests.add(line())
        requests.flush()

    asyncio.run(log())
    assert json.loads(out[0])["time"] == f"1970-01-01T00:00:{expected}Z"
