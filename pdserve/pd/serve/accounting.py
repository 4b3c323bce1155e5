"""Keep figures, a line in the log and a span of a request that is over."""

from __future__ import annotations

import re
from typing import Final

from pdserve.pd.errors import ApiError, ClientGoneError
from pdserve.pd.http import event_stream
from pdserve.pd.relay.client import Client
from pdserve.pd.requests.request import ClientRequest
from pdserve.pd.telemetry.cached_tokens import USAGE
from pdserve.pd.telemetry.metrics import Metrics
from pdserve.pd.telemetry.request_log import Outcome, RequestLine, RequestLog
from pdserve.pd.telemetry.spans import Spans, StageTime, Trace
from pdserve.pd.telemetry.usage_counts import of_event, of_value

_CLIENT_LEFT: Final = 499
_USAGE: Final = re.compile(rb', ?"usage" ?: ?(\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\})')
_WINDOW: Final = 8192
"""Bytes at the end of an answer in which a usage is looked for that belongs to no whole event."""
_Times = tuple[float | None, float | None, float | None, float | None, float | None]
"""In the queue, of prefill, of the KV transfer, to the first token, in all: milliseconds; None: not known."""
_UNKNOWN: Final[_Times] = (None, None, None, None, None)


class Accounting:
    """Counts, logs and traces each request that has ended."""

    def __init__(self, metrics: Metrics, log: RequestLog, spans: Spans) -> None:
        self.metrics, self.log, self.spans = metrics, log, spans

    def over(
        self,
        request: ClientRequest | None,
        client: Client,
        path: str,
        reason: ApiError | ClientGoneError | None,
        *,
        now: float,
        key: str = "",
        trace: Trace | None = None,
    ) -> None:
        """Account for a request that is over. `reason`: why it was no success. `request`: None when its body could not
        be read. `now`: time.monotonic()."""
        status = _CLIENT_LEFT if isinstance(reason, ClientGoneError) else reason.status if reason else 200
        prompt, completion = _usage(client)
        times = _UNKNOWN if request is None else self._timed(request, client, now)
        line = RequestLine(
            request_id=client.request_id,
            path=path,
            status=200 if client.started and status not in (200, _CLIENT_LEFT) and client.stream else status,
            outcome=_outcome(reason),
            key=key,
            model="" if request is None else request.model,
            decision="" if request is None else request.decision,
            prefill="" if request is None else request.prefill,
            decode="" if request is None else request.decode,
            attempts=0 if request is None else request.attempts,
            stream=client.stream,
            prompt_tokens=prompt,
            cached_tokens=client.cached_tokens,
            completion_tokens=completion,
            queue_ms=times[0],
            prefill_ms=times[1],
            kv_transfer_ms=times[2],
            ttft_ms=times[3],
            total_ms=times[4],
            chunks=client.chunks,
            bytes=client.relayed_bytes,
            error=reason.message if isinstance(reason, ApiError) else "",
        )
        if request is not None and trace is not None:
            self._span(trace, line, request, client, now)
        self._counted(line, request, reason)
        self.log.add(line)

    def _timed(self, request: ClientRequest, client: Client, now: float) -> _Times:
        """Count a request's stages, and return them as the log has them."""
        stages, metrics = request.stages, self.metrics
        received, admitted, prefilled, decoding = stages.received, stages.admitted, stages.prefilled, stages.decoding
        queue_ms = prefill_ms = kv_transfer_ms = ttft_ms = None
        total_ms = metrics.e2e.timed(now - received)
        if admitted:
            queue_ms = metrics.queue.timed(admitted - received)
            if prefilled:
                prefill_ms = metrics.prefill.timed(prefilled - admitted)
        if prefilled and decoding:
            # A decode that answers before prefill does has had its KV no later.
            kv_transfer_ms = metrics.kv_transfer.timed(max(0.0, decoding - prefilled))
        if client.first_byte:
            ttft_ms = metrics.ttft.timed(client.first_byte - received)
        return queue_ms, prefill_ms, kv_transfer_ms, ttft_ms, total_ms

    def _counted(self, line: RequestLine, request: ClientRequest | None, reason: object) -> None:
        metrics = self.metrics
        metrics.count("requests", (line.path, str(line.status)))
        if isinstance(reason, ClientGoneError):
            metrics.count("cancellations", (_stage(request),))
        elif isinstance(reason, ApiError):
            metrics.count("errors", (_blame(reason),))
            if line.stream:
                metrics.count("stream_errors", (line.decode,))
        if request is not None and request.decision:
            way = "disaggregated" if request.decision == "disaggregated" else "one-engine"
            metrics.count("disagg_decisions", (way, request.decision))
        if line.prompt_tokens:
            metrics.count("prompt_tokens", (), line.prompt_tokens)
        if line.completion_tokens:
            metrics.count("completion_tokens", (), line.completion_tokens)
        if line.cached_tokens:
            metrics.count("cached_prompt_tokens", (), line.cached_tokens)

    def _span(self, trace: Trace, line: RequestLine, request: ClientRequest, client: Client, now: float) -> None:
        stages = request.stages
        times = (
            ("queue", stages.received, stages.admitted),
            ("prefill", stages.admitted, stages.prefilled),
            ("kv_transfer", stages.prefilled, stages.decoding),
            ("decode", client.first_byte, now),
        )
        self.spans.end(
            trace,
            stages.received,
            now,
            [StageTime(name, began, ended) for name, began, ended in times if began and ended >= began],
            {
                "http.request.id": line.request_id,
                "url.path": line.path,
                "http.response.status_code": line.status,
                "pdserve.decision": line.decision,
                "pdserve.prefill": line.prefill,
                "pdserve.decode": line.decode,
                "pdserve.attempts": line.attempts,
            },
            failed=line.error or ("the client left" if line.outcome == "cancelled" else ""),
        )


def _outcome(reason: ApiError | ClientGoneError | None) -> Outcome:
    if reason is None:
        return "ok"
    if isinstance(reason, ClientGoneError):
        return "cancelled"
    return "rejected" if reason.status < 500 else "error"


def _blame(error: ApiError) -> str:
    if error.status == 429:
        return "limit"
    if error.status < 500:
        return "client"
    return "proxy" if error.status == 500 else "worker"


def _stage(request: ClientRequest | None) -> str:
    if request is None or not request.stages.admitted:
        return "queue"
    if request.stages.decoding:
        return "decode"
    return "kv_transfer" if request.stages.prefilled else "prefill"


def _usage(client: Client) -> tuple[int | None, int | None]:
    """Return the tokens of prompt and answer, as the engine reports them at the end of its answer; None: it has not."""
    if client.counted is not None:
        return client.counted
    return read_last_usage(client.last_words, stream=client.stream)


def read_last_usage(words: bytes, *, stream: bool) -> tuple[int | None, int | None]:
    """Return the tokens of prompt and answer that the end of an answer reports; None: it does not.

    Of an event or an answer of which only the end is left, the last `usage` counts: the engine's stands behind what it
    repeats of a request. In a JSON text quotes inside a string have a backslash, so that nothing here ever matches what
    a model has written.
    """
    at = len(words) if stream else 0
    while (at := words.rfind(USAGE, 0, at)) >= 0:
        begin, end = words.rfind(event_stream.END, 0, at), words.find(event_stream.END, at)
        prompt, answer = of_event(words[max(0, begin) : end if end >= 0 else len(words)])
        if prompt is not None or answer is not None:
            return prompt, answer
        at = max(0, begin)
    last = [of_value(match[1]) for match in _USAGE.finditer(words[-_WINDOW:])][-1:]
    return last[0] if last else (None, None)
