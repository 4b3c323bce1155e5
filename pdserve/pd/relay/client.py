"""Answer a client: a relayed answer on its way to the client, and the error when there is none.

What arrives from an engine is written to the client as it is, in whole events: so an error event can always follow.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from time import monotonic
from typing import Final

from pdserve.pd.errors import ApiError, ClientGoneError
from pdserve.pd.http import event_stream
from pdserve.pd.http.reply import HttpReply
from pdserve.pd.relay.leg import Leg, Receiver
from pdserve.pd.requests.dialects import Dialect
from pdserve.pd.requests.request import ClientRequest
from pdserve.pd.telemetry.cached_tokens import HINT, USAGE, safe_length, with_cached_tokens
from pdserve.pd.telemetry.metrics import Histogram
from pdserve.pd.telemetry.usage_counts import of_answer
from pdserve.pd.workers.wakeable import Wakeable

_END_BYTES: Final = 256
_TAIL_BYTES: Final = 2048
"""Of the end of an answer, where its usage is."""
_MAX_PENDING: Final = 1048576
"""Of an event that is not complete. What is larger goes on in pieces."""


class Client(Receiver):
    """Answers one client. `interruption` is why the answer must end early, if it must."""

    __slots__ = (
        "_before",
        "_itl",
        "_leg",
        "_mid_event",
        "_pending",
        "_tail",
        "asked",
        "cached_tokens",
        "chunks",
        "counted",
        "deadline",
        "dialect",
        "ended",
        "first_byte",
        "interruption",
        "last_byte",
        "on_answer",
        "relayed_bytes",
        "reply",
        "request_id",
        "stream",
        "watch",
    )

    def __init__(self, reply: HttpReply, request_id: str, dialect: Dialect, itl: Histogram | None = None) -> None:
        """Begin to answer. `itl` counts the seconds between two chunks of a stream."""
        self.reply = reply
        self._itl = itl
        self.request_id = request_id
        self.dialect = dialect
        self.asked: ClientRequest | None = None
        """What it asked for, from when that is read."""
        self.watch: Wakeable | None = None
        self.interruption: ApiError | ClientGoneError | None = None
        self.cached_tokens: int | None = None
        """Prompt tokens that prefill had in a cache; decode counts all that it was sent as cached."""
        self.on_answer: Callable[[], object] | None = None
        """Called when an answer begins to be relayed."""
        self.counted: tuple[int | None, int | None] | None = None
        """Tokens of prompt and answer, as an answer that came as a whole reports them."""
        self.deadline = math.inf
        """time.monotonic() at which it is interrupted; looked at every now and then."""
        self.stream = False
        self.ended = False
        self.chunks = 0
        self.relayed_bytes = 0
        self.first_byte = 0.0
        self.last_byte = 0.0
        """time.monotonic() of the first and the last write; 0: none yet. The loop's own clock counts milliseconds."""
        self._pending = b""
        self._mid_event = False
        """The client has the beginning of an event: another one cannot follow."""
        self._before = b""
        self._tail = b""
        self._leg: Leg | None = None
        reply.on_gone = self._gone

    @property
    def started(self) -> bool:
        return self.reply.started

    @property
    def last_words(self) -> bytes:
        """Return the end of what was relayed: usage comes in the last event but one, which may be as large as an
        answer."""
        return self._before + self._tail

    def interrupt(self, reason: ApiError | ClientGoneError) -> None:
        if self.interruption is None:
            self.interruption = reason
            if self.watch is not None:
                self.watch.wake()

    # --- relaying

    def relay(self, leg: Leg) -> None:
        """Sends a leg's answer on, as it comes, from what has come already. The request is not sent again from here on.
        Poked when it has ended."""
        self._leg = leg
        answer = leg.answer
        assert answer is not None
        if self.on_answer is not None:
            self.on_answer()
        self.stream = answer.content_type.startswith(event_stream.CONTENT_TYPE)
        headers = [(b"content-type", answer.content_type.encode("latin-1")), self._id_header()]
        if self.stream:
            headers.append((b"cache-control", b"no-cache"))
        data, answer.data = answer.data, b""
        if answer.complete and not self.stream:
            data = self._with_cached_tokens(data)
            self.counted = of_answer(data)
            self.reply.start(200, headers, len(data))
            self._tail = data[-_TAIL_BYTES:]
            self._count(data)
            self.reply.end(data)
            self.ended = True
            return
        self.reply.start(200, headers)
        if self.asked is not None:
            self.asked.drop_content()
        self.reply.on_pressure = leg.hold
        leg.relay_to(self)
        if data:
            self.on_data(data)
        if answer.complete:
            self.on_end()
        elif leg.failure is not None:
            # Its connection was lost while it waited to be relayed: there is no further call about it.
            self.on_cut()

    def on_data(self, data: bytes) -> None:
        if self._pending:
            data = self._pending + data
            self._pending = b""
        if not self.stream:
            if self.cached_tokens is not None:
                end = safe_length(data)
                self._pending, data = data[end:], self._with_cached_tokens(data[:end])
            self._write_part(data)
            return
        if data.endswith(event_stream.END):
            self._mid_event = False
        else:
            end = event_stream.whole_events(data)
            if end:
                self._mid_event = False
            elif len(data) > _MAX_PENDING:
                self._mid_event = True
                # The end of the event may be split.
                end = len(data) - len(event_stream.LONGEST_END)
            self._pending, data = data[end:], data[:end]
            if not data:
                return
        # rfind takes a third of the time of `in` for so short a text.
        if self.cached_tokens is not None and (self._mid_event or data.rfind(USAGE) >= 0):
            data = self._with_cached_tokens(data)
        self._before, self._tail = self._tail, data
        self._count(data)
        self.reply.write(data)

    def on_end(self) -> None:
        """End the answer: the leg is complete."""
        if self._pending:
            pending, self._pending = self._with_cached_tokens(self._pending), b""
            self._write_part(pending)
        done = self.dialect.end_of_stream
        if self.stream and done is not None and done not in self._tail[-_END_BYTES:]:
            self.interrupt(ApiError(502, f"{self._name()} ended its answer early"))
            return
        self.reply.end()
        self.ended = True
        if self.watch is not None:
            self.watch.poke()

    def on_cut(self) -> None:
        """End the answer with an error: the leg's connection was lost in the middle."""
        self._pending = b""
        self.interrupt(ApiError(502, f"{self._name()} closed the connection in the middle of its answer"))

    # --- errors

    def fail(self, error: ApiError) -> None:
        """Answer with an error: as the response if there is none yet, otherwise as the last event of the stream."""
        self._leg = None
        self.reply.on_pressure = None
        if not self.started:
            body = self.dialect.error_body(error)
            headers = [(b"content-type", b"application/json"), self._id_header()]
            headers += [(name.encode(), value.encode()) for name, value in error.headers().items()]
            self.reply.start(error.status, headers, len(body))
            self.reply.end(body)
        elif self.stream and not self._mid_event:
            self.reply.end(self.dialect.error_event(error, self._tail))
        else:
            # Half of a JSON document or of an event cannot be completed: the client must see that it is cut.
            self.reply.cut()
        self.ended = True

    # --- inside

    def _gone(self) -> None:
        self.interrupt(ClientGoneError())

    def _count(self, data: bytes) -> None:
        now = monotonic()
        if not self.first_byte:
            self.first_byte = now
        elif self._itl is not None:
            self._itl.observe(now - self.last_byte)
        self.last_byte = now
        self.chunks += 1
        self.relayed_bytes += len(data)

    def _with_cached_tokens(self, data: bytes) -> bytes:
        if self.cached_tokens is None or HINT not in data:
            return data
        return with_cached_tokens(data, self.cached_tokens)

    def _write_part(self, data: bytes) -> None:
        self._tail = (self._tail + data)[-_TAIL_BYTES:]
        if data:
            self._count(data)
            self.reply.write(data)

    def _id_header(self) -> tuple[bytes, bytes]:
        return b"x-request-id", self.request_id.encode("latin-1")

    def _name(self) -> str:
        return self._leg.worker.name if self._leg is not None else "The engine"
