"""Spans: in the client's trace, the engines below ours, and nothing of it where nobody asked."""

from __future__ import annotations

import builtins
import re
import subprocess
import sys
from types import ModuleType
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanContext, SpanKind, StatusCode

from pdserve.errors import RecipeError
from pdserve.pd.config.settings import OtelSettings
from pdserve.pd.telemetry.spans import NoSpans, OtelSpans, StageTime, open_spans, parse
from tests.proxy.rows import each

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED, UNSAMPLED = f"00-{TRACE}-{PARENT}-01", f"00-{TRACE}-{PARENT}-00"
STAGES = (StageTime("queue", 10.0, 10.5), StageTime("prefill", 10.5, 11.0))


class Traced:
    def __init__(self, sample_ratio: float = 1.0) -> None:
        self.exporter = InMemorySpanExporter()
        self.spans = OtelSpans(SimpleSpanProcessor(self.exporter), sample_ratio, "tiny")

    def request(self, traceparent: str | None, **more: Any) -> list[ReadableSpan]:
        """Spans of one request from second 10 to 12."""
        trace = self.spans.begin(traceparent)
        self.spans.end(trace, 10.0, 12.0, STAGES, {"pdserve.key": "team-a", "http.status": 200}, **more)
        return list(self.exporter.get_finished_spans())


def ids(span: ReadableSpan) -> SpanContext:
    assert isinstance(span.context, SpanContext)
    return span.context


def test_a_request_and_its_stages_are_in_the_clients_trace() -> None:
    whole, queue, prefill = Traced().request(SAMPLED)
    assert (whole.name, queue.name, prefill.name) == ("request", "queue", "prefill")
    assert {f"{ids(span).trace_id:032x}" for span in (whole, queue, prefill)} == {TRACE}
    assert len({ids(span).span_id for span in (whole, queue, prefill)}) == 3
    assert whole.parent is not None
    assert f"{whole.parent.span_id:016x}" == PARENT
    for stage in (queue, prefill):
        assert stage.parent is not None
        assert stage.parent.span_id == ids(whole).span_id
    assert whole.kind is SpanKind.SERVER
    assert whole.attributes == {"pdserve.key": "team-a", "http.status": 200}
    assert whole.resource.attributes["service.name"] == "tiny"


def test_times_are_those_of_the_request() -> None:
    whole, queue, prefill = Traced().request(None)
    assert whole.start_time is not None
    spans = [(span.start_time or 0, span.end_time or 0) for span in (whole, queue, prefill)]
    offsets = [
        (round((began - whole.start_time) / 1e9, 3), round((ended - whole.start_time) / 1e9, 3))
        for began, ended in spans
    ]
    assert offsets == [(0, 2), (0, 0.5), (0.5, 1)]


def test_engines_get_our_span_as_their_parent() -> None:
    traced = Traced()
    trace = traced.spans.begin(SAMPLED)
    assert re.fullmatch(rf"00-{TRACE}-[0-9a-f]{{16}}-01", trace.traceparent)
    assert PARENT not in trace.traceparent
    traced.spans.end(trace, 1.0, 2.0, (), {})
    assert f"{ids(traced.exporter.get_finished_spans()[0]).span_id:016x}" in trace.traceparent


def test_a_failure_is_in_its_span() -> None:
    whole, *_ = Traced().request(SAMPLED, failed="no worker")
    assert (whole.status.status_code, whole.status.description) == (StatusCode.ERROR, "no worker")


def test_a_client_that_does_not_sample_gets_no_spans_and_keeps_its_trace() -> None:
    traced = Traced()
    assert traced.request(UNSAMPLED) == []
    assert re.fullmatch(rf"00-{TRACE}-[0-9a-f]{{16}}-00", traced.spans.begin(UNSAMPLED).traceparent)


@each("ratio, spans", [(0.0, 0), (1.0, 3)])
def test_the_ratio_decides_about_requests_without_a_trace(ratio: float, spans: int) -> None:
    assert len(Traced(ratio).request(None)) == spans
    assert len(Traced(ratio).request(SAMPLED)) == 3


@each(
    "text",
    [
        "",
        "00",
        f"00-{TRACE}-{PARENT}",
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
    assert TRACE not in Traced().spans.begin(text).trace_id


def test_a_later_version_of_traceparent_is_understood() -> None:
    assert parse(f"01-{TRACE}-{PARENT}-03-more") == (TRACE, PARENT, True)


@pytest.mark.process
def test_without_the_setting_nothing_happens_and_nothing_is_imported() -> None:
    spans = open_spans(None, "tiny")
    assert isinstance(spans, NoSpans)
    assert spans.begin(SAMPLED) is None
    spans.close()
    code = (
        "import sys; from pdserve.pd.telemetry.spans import open_spans; open_spans(None, 'x');"
        "sys.exit(any(m.startswith('opentelemetry') for m in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_setting_without_the_package_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def missing(name: str, *args: Any, **more: Any) -> ModuleType:
        if name.startswith("opentelemetry.exporter"):
            raise ImportError(f"No module named {name!r}")
        return real(name, *args, **more)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(RecipeError) as refused:
        open_spans(OtelSettings(endpoint="http://h:4318/v1/traces"), "tiny")
    assert refused.value.todo is not None
    assert "pdserve[otel]" in refused.value.todo
