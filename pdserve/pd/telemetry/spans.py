"""OpenTelemetry spans: one for a request and one for each of its stages, made when the request is over.

Only the ids must be known earlier, because the engines get them in `traceparent`; a stage's times are measured anyway.
So a request that is not sampled costs a few bytes, and OpenTelemetry is imported only where it is configured.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from pdserve.errors import RecipeError
from pdserve.pd.config.settings import OtelSettings

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor
    from opentelemetry.trace import SpanContext, SpanKind, Status

_TRACEPARENT = re.compile(r"(?!ff)([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED = 1
_ZERO = ("0" * 32, "0" * 16)
_FLUSH_MILLISECONDS = 5000
# Ids need to be different, not secret.
_random = random.SystemRandom()


@dataclass(frozen=True, slots=True)
class Trace:
    """The place of a request: its trace, its own span, and the client's span, if it named one."""

    trace_id: str
    span_id: str
    parent_id: str | None
    sampled: bool

    @property
    def traceparent(self) -> str:
        """Return the header for the engines, whose spans become children of ours."""
        return f"00-{self.trace_id}-{self.span_id}-{self.sampled:02x}"


@dataclass(frozen=True, slots=True)
class StageTime:
    """A part of a request. Times are those of the event loop, seconds."""

    name: str
    began: float
    ended: float


class Spans(Protocol):
    """Tracing, as the data plane needs it."""

    def begin(self, traceparent: str | None) -> Trace | None:
        """Begin the trace of a new request. None: the client's own headers go on as they are."""

    def end(
        self,
        trace: Trace,
        began: float,
        ended: float,
        stages: Sequence[StageTime],
        attributes: Mapping[str, str | int | float | bool],
        *,
        failed: str = "",
    ) -> None:
        """End the trace of a request that is over. `failed`: why it was no success."""

    def close(self) -> None:
        """Send what is left."""


class NoSpans:
    """Stands for spans where tracing is not configured."""

    def begin(self, traceparent: str | None) -> Trace | None:
        return None

    def end(
        self,
        trace: Trace,
        began: float,
        ended: float,
        stages: Sequence[StageTime],
        attributes: Mapping[str, str | int | float | bool],
        *,
        failed: str = "",
    ) -> None:
        """Do nothing: no span was begun."""

    def close(self) -> None:
        """Do nothing: no span is left."""


class OtelSpans:
    """Hands finished spans to OpenTelemetry, which sends them from a thread of its own."""

    def __init__(self, processor: SpanProcessor, sample_ratio: float, service: str) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        self._processor = processor
        self._sample_ratio = sample_ratio
        self._resource = Resource.create({"service.name": service})
        self._scope = InstrumentationScope("pdserve.proxy")
        # Loop times count from an arbitrary start; spans carry the time of day.
        self._offset = time.time() - time.monotonic()

    def begin(self, traceparent: str | None) -> Trace:
        """Begin the trace of a new request. A client that sends a valid traceparent has also decided whether the
        request is sampled."""
        parsed = parse(traceparent)
        span_id = f"{_random.getrandbits(64) or 1:016x}"
        if parsed is not None:
            trace_id, parent_id, sampled = parsed
            return Trace(trace_id, span_id, parent_id, sampled)
        return Trace(f"{_random.getrandbits(128) or 1:032x}", span_id, None, _random.random() < self._sample_ratio)

    def end(
        self,
        trace: Trace,
        began: float,
        ended: float,
        stages: Sequence[StageTime],
        attributes: Mapping[str, str | int | float | bool],
        *,
        failed: str = "",
    ) -> None:
        if not trace.sampled:
            return
        from opentelemetry.trace import SpanKind, Status, StatusCode

        whole = self._context(trace.trace_id, trace.span_id, remote=False)
        parent = None if trace.parent_id is None else self._context(trace.trace_id, trace.parent_id, remote=True)
        status = Status(StatusCode.ERROR, failed) if failed else Status(StatusCode.UNSET)
        self._send("request", whole, parent, SpanKind.SERVER, began, ended, status, attributes)
        for stage in stages:
            context = self._context(trace.trace_id, f"{_random.getrandbits(64) or 1:016x}", remote=False)
            unset = Status(StatusCode.UNSET)
            self._send(stage.name, context, whole, SpanKind.INTERNAL, stage.began, stage.ended, unset, {})

    def close(self) -> None:
        self._processor.force_flush(_FLUSH_MILLISECONDS)
        self._processor.shutdown()

    def _context(self, trace_id: str, span_id: str, *, remote: bool) -> SpanContext:
        from opentelemetry.trace import SpanContext, TraceFlags

        return SpanContext(int(trace_id, 16), int(span_id, 16), remote, TraceFlags(_SAMPLED))

    def _send(
        self,
        name: str,
        context: SpanContext,
        parent: SpanContext | None,
        kind: SpanKind,
        began: float,
        ended: float,
        status: Status,
        attributes: Mapping[str, str | int | float | bool],
    ) -> None:
        from opentelemetry.sdk.trace import ReadableSpan

        span = ReadableSpan(
            name=name,
            context=context,
            parent=parent,
            resource=self._resource,
            attributes=attributes,
            kind=kind,
            status=status,
            start_time=int((began + self._offset) * 1e9),
            end_time=int((ended + self._offset) * 1e9),
            instrumentation_scope=self._scope,
        )
        self._processor.on_end(span)


def parse(traceparent: str | None) -> tuple[str, str, bool] | None:
    """Return the trace id, span id and whether it is sampled, of a W3C traceparent; None when it is none."""
    match = _TRACEPARENT.fullmatch(traceparent or "")
    if match is None or (match[1] == "00" and match[5]) or match[2] == _ZERO[0] or match[3] == _ZERO[1]:
        return None
    return match[2], match[3], bool(int(match[4], 16) & _SAMPLED)


def open_spans(settings: OtelSettings | None, service: str) -> Spans:
    """Open tracing as it is configured. Raises RecipeError when OpenTelemetry is wanted and not installed."""
    if settings is None:
        return NoSpans()
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise RecipeError(
            f"proxy.otel needs OpenTelemetry, which is not installed: {error}",
            where="proxy.otel",
            todo="pip install 'pdserve[otel]', or remove proxy.otel",
        ) from error
    return OtelSpans(BatchSpanProcessor(OTLPSpanExporter(endpoint=settings.endpoint)), settings.sample_ratio, service)
