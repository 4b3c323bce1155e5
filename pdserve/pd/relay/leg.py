"""One request to one worker, from now until its end.

A leg holds back the head of a stream until its first data event, because vLLM answers 200 before it knows whether the
KV arrives: up to then a failure still has a proper status, and another attempt is still possible.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from time import monotonic
from typing import Any, Final

from pdserve.pd.errors import ApiError, from_event, from_upstream
from pdserve.pd.http import event_stream
from pdserve.pd.http.pieces import Payload
from pdserve.pd.http.upstream import Sink, UpstreamConnection
from pdserve.pd.relay.dial import dial
from pdserve.pd.workers.failure import WorkerFailedError
from pdserve.pd.workers.judgement import Fault
from pdserve.pd.workers.registry import Worker

HELD_BYTES: Final = 1024 * 1024
"""An answer that is no stream is held up to this size: an engine that dies while it sends can still be replaced."""
UNREAD_SECONDS: Final = 1.0
"""A connection that the engine had closed before it read the request is seen to be lost within this time. One that is
lost later has been read."""
_FAULTS: Final[dict[int, Fault]] = {404: "absent", 429: "unavailable", 503: "unavailable"}
"""Of statuses that are more than a refusal, and less than a failure of the engine."""


class EngineAnswer:
    """A good answer whose beginning has arrived."""

    __slots__ = ("complete", "content_type", "data")

    def __init__(self, content_type: str, data: bytes, complete: bool) -> None:
        self.content_type = content_type
        self.data = data
        """What has come so far and was not relayed yet."""
        self.complete = complete


class Receiver:
    """Base class of what an answer is relayed to while it arrives (relay.client)."""

    __slots__ = ()

    def on_data(self, data: bytes) -> None:
        """Take some of the answer."""
        raise NotImplementedError

    def on_end(self) -> None:
        """Hear that the answer is complete."""
        raise NotImplementedError

    def on_cut(self) -> None:
        """Hear that the connection was lost in the middle of the answer."""
        raise NotImplementedError


class Leg(Sink):
    """Is one request to a worker, and its answer. `poke` is called whenever `answer` or `failure` change, and for
    `reached` if that is waited for."""

    __slots__ = (
        "_body",
        "_client",
        "_closed",
        "_connecting",
        "_connection",
        "_content_type",
        "_counted",
        "_data",
        "_head",
        "_hung_up",
        "_is_load",
        "_lost",
        "_on_complete",
        "_resend_until",
        "_reused",
        "_status",
        "_streams",
        "_usable_until",
        "answer",
        "began",
        "complete",
        "failure",
        "first_byte",
        "poke",
        "poke_on_reached",
        "reached",
        "settled",
        "worker",
    )

    def __init__(
        self,
        worker: Worker,
        head: bytes,
        body: Payload,
        poke: Callable[[], None],
        on_complete: Callable[[], None] | None = None,
        usable_until: float = math.inf,
        *,
        is_load: bool = True,
    ) -> None:
        """Send a request to a worker. `head`: request line and headers, complete. `on_complete`: called once, when
        nothing more will come, or when the leg is closed. `usable_until`: loop time from which the body must not be
        sent any more. `is_load`: the worker is as busy with it as with a client's request."""
        self.worker = worker
        self.began = monotonic()
        self._is_load = is_load
        self._on_complete = on_complete
        self.poke = poke
        self.reached = False
        """The engine has the whole request."""
        self.poke_on_reached = False
        """`poke` is called when it is reached."""
        self.answer: EngineAnswer | None = None
        self.failure: WorkerFailedError | None = None
        self.settled = False
        """There is an answer or a failure."""
        self.complete = False
        """Nothing more will come: a failure, or the end of the answer."""
        self.first_byte = 0.0
        """time.monotonic() of the answer's beginning."""
        self._head, self._body = head, body
        self._status = 0
        self._content_type = ""
        self._streams = False
        self._data = b""
        self._client: Receiver | None = None
        self._closed = False
        self._hung_up = False
        self._counted = False
        self._lost = False
        """A connection on which it was sent has ended."""
        self._connecting: asyncio.Task[None] | None = None
        if is_load:
            worker.opened()
        self._connection: UpstreamConnection | None = worker.pool.take()
        self._reused = self._connection is not None
        """On a connection that served before: the engine may have closed it without our knowing."""
        self._usable_until = self._resend_until = usable_until
        if self._connection is not None:
            self._resend_until = min(usable_until, worker.pool.now() + UNREAD_SECONDS)
            self._connection.send(head, body, self)
        else:
            self._dial()

    @property
    def delivered(self) -> bool:
        """Tell whether the engine has the request, or never will."""
        return self.reached or self.failure is not None

    def close(self) -> None:
        """Ends the leg: an engine that is still working on it sees its client leave and aborts."""
        if self._closed:
            return
        self._closed = True
        self.poke = ignore_poke
        self._client = None
        if self._is_load:
            self.worker.closed()
        if not self.settled:
            self._failed_by(self._failure("was left", retry=False))
        if self._connecting is not None:
            self._connecting.cancel()
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.abort()
        if not self._counted:
            self._completed()

    def hang_up(self) -> None:
        """Close, but still take an answer that the engine has sent before it sees that. Needs a close."""
        if self._connection is None:
            self.close()
            return
        self._hung_up = True
        self._connection.hang_up()

    def relay_to(self, client: Receiver) -> None:
        """Send data straight to the client from now on."""
        self._client = client

    def hold(self, wait: bool) -> None:
        """Stops reading from the engine while its client does not read from us."""
        if self._connection is not None:
            self._connection.pause() if wait else self._connection.resume()

    def drop_request(self) -> None:
        """Drop the request: it is not sent again, should its connection be lost. One that is still being sent stays."""
        if self.reached:
            self._head = self._body = b""
            self._resend_until = 0.0

    def result(self) -> EngineAnswer:
        """Return the answer; raises the failure."""
        if self.failure is not None:
            raise self.failure
        assert self.answer is not None
        return self.answer

    # --- for dial

    def connected(self, connection: UpstreamConnection) -> None:
        self._connecting = None
        if self._closed:
            connection.abort()
            return
        if self.worker.pool.now() >= self._usable_until:
            connection.abort()
            self._end_with(self._failure("cannot be reached in time", retry=True))
            return
        self._connection = connection
        connection.send(self._head, self._body, self)

    def unreachable(self, how: str, ours: bool) -> None:
        """End the leg: its worker cannot be reached, or has closed the connection. `ours`: this process has no
        descriptor left, which is no fault of the worker."""
        fault: Fault | None = None if ours else "lost" if self._lost else "unreachable"
        # Who has read a request and is gone may have died of it.
        what = "closed the connection" if fault == "lost" else f"cannot be reached{how}"
        error = ApiError(502, f"{self.worker.name} {what}")
        self._end_with(WorkerFailedError(self.worker, error, retry=True, fault=fault))

    # --- Sink

    def on_status(self, status: int, content_type: str) -> None:
        self._reused = False
        self._head = self._body = b""
        self._status, self._content_type = status, content_type
        self._streams = content_type.startswith(event_stream.CONTENT_TYPE)

    def on_data(self, data: bytes) -> None:
        client = self._client
        if client is not None:
            client.on_data(data)
        elif self.answer is not None:
            self.answer.data += data
        else:
            if not self.first_byte:
                self.first_byte = monotonic()
            self._data = self._data + data if self._data else data
            if self._streams and self._status == 200:
                self._begin()
            elif len(self._data) <= HELD_BYTES:
                return
            elif self._status == 200:
                self._answer(complete=False)
            else:
                self._fail(self._error(b""))

    def on_end(self) -> None:
        self._connection = None
        if self.answer is not None:
            self.answer.complete = self.complete = True
            self._completed()
            if self._client is not None:
                self._client.on_end()
            else:
                self.poke()
        elif self._status != 200:
            self._fail(self._error(self._data))
        elif self._streams:
            self._fail(ApiError(502, f"{self.worker.name} ended the stream before its first event"))
        else:
            self._answer(complete=True)

    def on_sent(self) -> None:
        self.reached = True
        if not self._reused:
            self._body = b""
        if self.poke_on_reached:
            self.poke()

    def on_lost(self) -> None:
        self._connection = None
        if self._hung_up and not self.settled:
            poke = self.poke
            self.close()
            poke()
        elif self._reused and self.worker.pool.now() < self._resend_until:
            # Not a byte of an answer: it was closed before the engine read the request (uvicorn does so behind an
            # answer of 500, and after a pause). A new connection shows whether the engine is there. What an engine may
            # have read is never sent again: its KV may be taken already.
            self._reused = self.reached = False
            self._lost = True
            self._dial()
        elif self.answer is None:
            self._fail(ApiError(502, f"{self.worker.name} closed the connection"), "lost")
        else:
            client = self._client
            error = ApiError(502, f"{self.worker.name} closed the connection in the middle of its answer")
            self._end_with(WorkerFailedError(self.worker, error, retry=False, fault="lost"))
            if client is not None:
                # Nobody tries again, so nobody else tells.
                self.worker.judgement.failed("lost", self.worker.pool.now())
                client.on_cut()

    # --- inside

    def _dial(self) -> None:
        work = dial(self.worker.pool, self.connected, self.unreachable)
        self._connecting = asyncio.get_running_loop().create_task(work)

    def _begin(self) -> None:
        """Looks whether enough of a stream is there."""
        event = event_stream.first_event(self._data)
        if event is None:
            if len(self._data) > HELD_BYTES:
                # An event of that size is no error, and it must not wait in our memory.
                self._answer(complete=False)
            return
        if b'"error"' in event and (error := from_event(self.worker.name, event)) is not None:
            self._fail(error)
        else:
            self._answer(complete=False)

    def _error(self, body: bytes) -> ApiError:
        return from_upstream(self.worker.name, self._status, body, self.worker.key_of_client)

    def _answer(self, *, complete: bool) -> None:
        now = self.worker.pool.now()
        self.worker.heard = now
        self.worker.judgement.answered(now)
        self.answer = EngineAnswer(self._content_type, self._data, complete)
        self._data = b""
        self.settled, self.complete = True, complete
        if complete:
            self._completed()
        self.poke()

    def _fail(self, error: ApiError, fault: Fault | None = None) -> None:
        """End the leg: the worker took the request and failed with it, or (4xx) has refused it. What that says of the
        worker shows when another one is tried."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.abort()
        if self._status:
            self.worker.heard = self.worker.pool.now()
        if fault is None:
            fault = _FAULTS.get(error.status, "failed" if error.status >= 500 else None)
        self._end_with(WorkerFailedError(self.worker, error, retry=fault is not None, fault=fault))

    def _end_with(self, failure: WorkerFailedError) -> None:
        self._failed_by(failure)
        self._completed()
        self.poke()

    def _failed_by(self, failure: WorkerFailedError) -> None:
        self._head = self._body = b""
        self.failure = failure
        self.settled = self.complete = True

    def _completed(self) -> None:
        if self._counted:
            return
        self._counted = True
        outcomes, outcome = self.worker.outcomes, self._outcome()
        outcomes[outcome] = outcomes.get(outcome, 0) + 1
        on_complete, self._on_complete = self._on_complete, None
        if on_complete is not None:
            on_complete()

    def _outcome(self) -> str:
        if self.failure is not None:
            if self._closed:
                return "left"
            return "refused" if self.failure.error.status < 500 else "failed"
        return "ok" if self.answer is not None and self.answer.complete else "left"

    def _failure(self, what: str, *, retry: bool) -> WorkerFailedError:
        return WorkerFailedError(self.worker, ApiError(502, f"{self.worker.name} {what}"), retry=retry)


def ignore_poke(_: Any = None) -> None:
    """Do nothing: this is the poke of a leg for which nothing waits."""
