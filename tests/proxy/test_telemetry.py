"""The page of metrics, the log of requests, spans, and the tokens that an answer reports: the engine's word counts."""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanContext, SpanKind, StatusCode
from prometheus_client.parser import text_string_to_metric_families

from pdserve.errors import RecipeError
from pdserve.pd.config.settings import LogFormat, OtelSettings
from pdserve.pd.errors import ApiError
from pdserve.pd.protocols.prefill_leg import bad_end, good_end
from pdserve.pd.requests.dialects import RESPONSES
from pdserve.pd.serve.accounting import read_last_usage
from pdserve.pd.serve.member import FRESH_A_SECOND, PageLimit
from pdserve.pd.telemetry.metrics import Metrics
from pdserve.pd.telemetry.request_log import RequestLine, RequestLog
from pdserve.pd.telemetry.spans import OtelSpans, StageTime, Trace, open_spans, parse
from pdserve.pd.telemetry.usage_counts import cached_in, of_answer
from tests.tables import each_row

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def samples(page: bytes) -> Samples:
    """By name and labels, as Prometheus reads them."""
    by_labels: Samples = {}
    for family in text_string_to_metric_families(page.decode()):
        for sample in family.samples:
            place = (sample.name, tuple(sorted(sample.labels.items())))
            assert place not in by_labels, f"{place} is there twice"
            by_labels[place] = sample.value
    return by_labels


def test_a_histogram_counts_up_to_and_including_its_bounds() -> None:
    metrics = Metrics()
    for seconds in (0.0, 0.001, 0.0011, 600.0, 601.0):
        metrics.ttft.observe(seconds)
    values = samples(metrics.page())
    name = "pdserve_proxy_ttft_seconds"
    assert values[f"{name}_bucket", (("le", "0.001"),)] == 2
    assert values[f"{name}_bucket", (("le", "0.0025"),)] == 3
    assert values[f"{name}_bucket", (("le", "600.0"),)] == 4
    assert values[f"{name}_bucket", (("le", "+Inf"),)] == 5
    assert values[f"{name}_count", ()] == 5
    assert values[f"{name}_sum", ()] == pytest.approx(1201.0021)


def test_counters_have_their_labels_and_gauges_are_read_when_the_page_is_made() -> None:
    metrics = Metrics()
    metrics.count("failovers", ("prefill", "refused"))
    metrics.count("failovers", ("prefill", "refused"))
    metrics.count("completion_tokens", (), 37)
    depth = 3.0
    metrics.read_gauges_from(lambda: [("queue_depth", ("decode",), depth)])
    values = samples(metrics.page())
    assert values["pdserve_proxy_failovers_total", (("reason", "refused"), ("role", "prefill"))] == 2
    assert values["pdserve_proxy_completion_tokens_total", ()] == 37
    assert values["pdserve_proxy_unauthorized_total", ()] == 0
    assert values["pdserve_proxy_queue_depth", (("pool", "decode"),)] == 3
    depth = 0.0
    assert samples(metrics.page())["pdserve_proxy_queue_depth", (("pool", "decode"),)] == 0


def test_several_processes_are_added_up_and_what_they_share_is_not() -> None:
    processes = [Metrics() for _ in range(3)]
    for number, metrics in enumerate(processes):
        metrics.itl.observe(0.003)
        metrics.e2e.observe(number)
        metrics.count("requests", ("/v1/completions", "200"), number)
        metrics.read_gauges_from(
            lambda: [("queue_depth", ("decode",), 2), ("in_flight", ("decode", "decode-0"), 7), ("connections", (), 4)]
        )
    snapshots = [other.snapshot() for other in processes[1:]]
    values = samples(processes[0].page(snapshots))
    assert samples(processes[0].page(snapshots)) == values, "nothing is counted twice when it is asked for twice"
    assert values["pdserve_proxy_itl_seconds_count", ()] == 3
    assert values["pdserve_proxy_e2e_seconds_sum", ()] == 3
    assert values["pdserve_proxy_requests_total", (("path", "/v1/completions"), ("status", "200"))] == 3
    assert values["pdserve_proxy_queue_depth", (("pool", "decode"),)] == 6
    assert values["pdserve_proxy_connections", ()] == 12
    assert values["pdserve_proxy_in_flight", (("role", "decode"), ("worker", "decode-0"))] == 7


def test_the_page_is_made_only_so_often_whoever_asks() -> None:
    made, now = itertools.count(), [100.2]
    limit = PageLimit(lambda: b"%d" % next(made), lambda: now[0])
    pages = [limit.page() for _ in range(10 * FRESH_A_SECOND)]
    assert pages[:FRESH_A_SECOND] == [b"%d" % number for number in range(FRESH_A_SECOND)]
    assert set(pages[FRESH_A_SECOND:]) == {pages[FRESH_A_SECOND - 1]}
    now[0] = 101.0
    assert limit.page() == b"%d" % FRESH_A_SECOND


# --- one line a request, readable by people or machines, whatever clients put into it


NOON = datetime(2026, 5, 4, 12, 0, 0, 123456, tzinfo=UTC)


def written(form: LogFormat, line: RequestLine, now: Callable[[], float] = NOON.timestamp) -> bytes:
    async def log() -> bytes:
        out: list[bytes] = []
        requests = RequestLog(out.append, form, now=now)
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


def test_json_and_text_have_what_is_known_and_nothing_else() -> None:
    assert json.loads(written("json", line(**FULL))) == {
        "request_id": "r-1",
        "path": "/v1/completions",
        "status": 200,
        "outcome": "ok",
        "time": "2026-05-04T12:00:00.123Z",
        **FULL,
    }
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


async def test_lines_are_written_together_and_none_waits_for_ever() -> None:
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


@each_row("seconds, expected", [(0.0, "00.000"), (59.9999, "59.999"), (1.0005, "01.000")])
def test_the_time_of_day_is_cut_not_rounded_up(seconds: float, expected: str) -> None:
    assert json.loads(written("json", line(), lambda: seconds))["time"] == f"1970-01-01T00:00:{expected}Z"


# --- spans: in the client's trace, the engines below ours, and nothing of it where nobody asked


TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED, UNSAMPLED = f"00-{TRACE}-{PARENT}-01", f"00-{TRACE}-{PARENT}-00"
TIMES = (StageTime("queue", 10.0, 10.5), StageTime("prefill", 10.5, 11.0))


def traced(traceparent: str | None, ratio: float = 1.0, **more: Any) -> tuple[Trace, list[ReadableSpan]]:
    """One request from second 10 to 12: its place and its spans."""
    exporter = InMemorySpanExporter()
    spans = OtelSpans(SimpleSpanProcessor(exporter), ratio, "tiny")
    trace = spans.begin(traceparent)
    spans.end(trace, 10.0, 12.0, TIMES, {"pdserve.key": "team-a", "http.status": 200}, **more)
    return trace, list(exporter.get_finished_spans())


def ids(span: ReadableSpan) -> SpanContext:
    assert isinstance(span.context, SpanContext)
    return span.context


def test_a_request_and_its_stages_are_in_the_clients_trace() -> None:
    trace, (whole, queue, prefill) = traced(SAMPLED)
    assert trace.traceparent == f"00-{TRACE}-{ids(whole).span_id:016x}-01", "engines get our span as their parent"
    assert (whole.name, queue.name, prefill.name) == ("request", "queue", "prefill")
    assert {f"{ids(span).trace_id:032x}" for span in (whole, queue, prefill)} == {TRACE}
    assert len({ids(span).span_id for span in (whole, queue, prefill)}) == 3
    assert whole.parent is not None
    assert f"{whole.parent.span_id:016x}" == PARENT
    for stage in (queue, prefill):
        assert stage.parent is not None
        assert stage.parent.span_id == ids(whole).span_id
    assert whole.kind is SpanKind.SERVER
    began = whole.start_time or 0
    spans = [((span.start_time or 0) - began, (span.end_time or 0) - began) for span in (whole, queue, prefill)]
    assert [(round(start / 1e9, 3), round(end / 1e9, 3)) for start, end in spans] == [(0, 2), (0, 0.5), (0.5, 1)]
    assert whole.attributes == {"pdserve.key": "team-a", "http.status": 200}
    assert whole.resource.attributes["service.name"] == "tiny"


def test_a_failure_is_in_its_span() -> None:
    _, (whole, *_) = traced(SAMPLED, failed="no worker")
    assert (whole.status.status_code, whole.status.description) == (StatusCode.ERROR, "no worker")


@each_row("traceparent, ratio, spans", [(SAMPLED, 0.0, 3), (UNSAMPLED, 1.0, 0), (None, 0.0, 0), (None, 1.0, 3)])
def test_the_client_decides_and_without_a_trace_the_ratio(traceparent: str | None, ratio: float, spans: int) -> None:
    trace, made = traced(traceparent, ratio)
    assert (len(made), trace.traceparent[-2:]) == (spans, "01" if spans else "00")


@each_row(
    "text",
    [
        "",
        f"00-{TRACE}-{PARENT}-01-more",
        f"ff-{TRACE}-{PARENT}-01",
        f"00-{'0' * 32}-{PARENT}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE.upper()}-{PARENT}-01",
        f"00-{TRACE}-{PARENT}-01\r\nx: y",
    ],
)
def test_what_is_no_traceparent_starts_a_trace_of_its_own(text: str) -> None:
    assert parse(text) is None
    assert TRACE not in traced(text)[0].trace_id


def test_a_later_version_of_traceparent_is_understood() -> None:
    assert parse(f"01-{TRACE}-{PARENT}-03-more") == (TRACE, PARENT, True)


def test_without_the_setting_nothing_happens() -> None:
    spans = open_spans(None, "tiny")
    assert spans.begin(SAMPLED) is None
    spans.close()


def test_the_setting_without_the_package_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(RecipeError) as refused:
        open_spans(OtelSettings(endpoint="http://h:4318/v1/traces"), "tiny")
    assert "pdserve[otel]" in (refused.value.todo or "")


# --- the tokens that an answer reports, and the end of a prefill: the engine's word counts


TOO_LARGE = b"9" * 400


@each_row(
    "usage, cached",
    [
        (b'{"prompt_tokens":9,"prompt_tokens_details":{"cached_tokens":4}}', 4),
        (b'{"input_tokens":9,"input_tokens_details":{"cached_tokens":4}}', 4),
        (b'{"input_tokens":5,"cache_read_input_tokens":4}', 4),
        (b'{"prompt_tokens":9,"prompt_tokens_details":null}', None),
        (b'{"prompt_tokens_details":{"cached_tokens":' + TOO_LARGE + b"}}", None),
        (b"null", None),
    ],
)
def test_cached_tokens_are_those_of_the_engines_usage(usage: bytes, cached: int | None) -> None:
    tools = b'"tools":[{"parameters":{"cached_tokens":' + TOO_LARGE + b',"cache_read_input_tokens":7}}]'
    assert cached_in(b'{"id":"r",' + tools + b',"usage":' + usage + b"}") == cached


@each_row(
    "answer, end",
    [
        (b'{"choices":[5]}', "an unreadable answer"),
        (b'{"choices":5}', "an unreadable answer"),
        (b'{"choices":{"a":1}}', "an unreadable answer"),
        (b"null", "an unreadable answer"),
        (b"", "an unreadable answer"),
        (b"[" * 50000, "an unreadable answer"),
        (b'{"choices":[{"finish_reason":[]}', "an unreadable answer"),
        (b'{"choices":[{"finish_reason":"stop"}]}', None),
        # A token of a prefill is not its end.
        (b'{"choices":[{"text":"stop","finish_reason":"abort"}]}', "abort"),
        (b'{"choices":[{"text":"a","logprobs":{"tokens":["length"]},"finish_reason":"error"}]}', "error"),
    ],
)
def test_a_prefill_that_was_aborted_or_whose_answer_cannot_be_read_has_failed(answer: bytes, end: str | None) -> None:
    assert (good_end(answer), bad_end(answer)) == (end is None, end)


@each_row(
    "echoed",
    [
        {"user": "usage"},
        {"user": "message_start"},
        {"user": 'event: message_start "usage": {"output_tokens": 1}'},
        {"tools": [{"parameters": {"choices": [1], "index": 0}}]},
        {"tools": [{"parameters": {"a": 1, "usage": {"input_tokens": 1, "output_tokens": 1 << 52}}}]},
        {"tools": [{"parameters": {"x": {}, "usage": {"input_tokens": -1, "output_tokens": 10**400}}}]},
        {"metadata": {"type": "message_start"}, "user": "usage"},
    ],
)
@each_row("padding", [0, 5000])
def test_whatever_an_event_repeats_of_a_request_its_own_usage_counts(echoed: dict[str, Any], padding: int) -> None:
    """As vLLM orders them: tools before the usage, the user behind it; of any length."""
    response = {
        "instructions": "x" * padding,
        "tools": echoed.get("tools", []),
        "metadata": echoed.get("metadata"),
        "usage": {"input_tokens": 50_000, "output_tokens": 700, "output_tokens_details": {"reasoning_tokens": 0}},
        "user": echoed.get("user"),
    }
    assert of_answer(json.dumps(response).encode()) == (50_000, 700)
    last = (
        b"event: response.completed\ndata: %b\n\n"
        % json.dumps({"type": "response.completed", "sequence_number": 9, "response": response}).encode()
    )
    assert read_last_usage(last, stream=True) == (50_000, 700)
    assert read_last_usage(b'"instructions": "' + last, stream=True) == (50_000, 700), "of one that was cut"


def test_a_huge_echoed_number_ends_no_error() -> None:
    event = RESPONSES.error_event(
        ApiError(504, "late"), b'"sequence_number": 7, "tools": "sequence_number": ' + b"9" * 4300
    )
    assert json.loads(event.partition(b"data: ")[2])["sequence_number"] == 8


@each_row("count", [b"-1", TOO_LARGE, b"1.5", b'"7"'])
def test_what_is_no_number_of_tokens_is_none(count: bytes) -> None:
    answer = b'{"usage":{"prompt_tokens":%s,"completion_tokens":3}}' % count
    assert of_answer(answer) == (None, None)
    assert read_last_usage(b'{"id":"x",' + answer[1:], stream=False) == (None, None)


def test_a_usage_with_many_details_counts() -> None:
    details = b",".join(b'"turn_%d_details":{"tokens":%d}' % (turn, turn) for turn in range(200))
    usage = b'"usage":{"input_tokens":200000,%s,"output_tokens":20000}' % details
    assert of_answer(b'{"id":"r",' + usage + b"}") == (200_000, 20_000)


def test_of_a_stream_that_counts_in_each_event_the_last_one_counts() -> None:
    """Who asks for that and leaves in the middle has got so much."""
    usage = b'"usage":{"prompt_tokens":5,"completion_tokens":%d}'
    event = b'data: {"choices":[{"index":0,"delta":{"content":"%s"}}],' + usage + b"}\n\n"
    in_text = rb",\"usage\":{\"completion_tokens\":99}"
    assert read_last_usage(event % (b"a", 1) + event % (in_text, 2), stream=True) == (5, 2)
    assert read_last_usage(b'data: {"choices":[]}\n\n', stream=True) == (None, None)
