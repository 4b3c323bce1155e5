"""A client's request on its way through the proxy. No dataclasses: mypyc leaves their constructors interpreted."""

from __future__ import annotations

from typing import Final

from pdserve.pd.http.incoming import Request
from pdserve.pd.limits.admission import Ticket
from pdserve.pd.requests.body import Body
from pdserve.pd.requests.dialects import Dialect
from pdserve.pd.routing.ask import RoutingRequest

_NO_BODY: Final = Body(b"{}")


class Stages:
    """Values of time.monotonic() at which a request reached each stage; 0: it did not."""

    __slots__ = ("admitted", "decoding", "prefilled", "received")

    def __init__(self, received: float = 0.0) -> None:
        self.received = received
        self.admitted = 0.0
        self.prefilled = 0.0
        """Prefill has answered: the KV of the prompt is there."""
        self.decoding = 0.0
        """Decode's answer has begun: the KV has arrived."""


class ClientRequest:
    """Holds what is sent on, what routing may look at, and what became of it: for log, spans and metrics."""

    __slots__ = (
        "ask",
        "attempts",
        "body",
        "decision",
        "decode",
        "dialect",
        "headers",
        "incoming",
        "model",
        "prefill",
        "prefill_ticket",
        "priority",
        "request_id",
        "stages",
        "target",
        "tried",
    )

    def __init__(
        self,
        dialect: Dialect,
        body: Body,
        target: bytes,
        request_id: str,
        headers: bytes,
        ask: RoutingRequest,
        *,
        received: float = 0.0,
        priority: int = 0,
        incoming: Request | None = None,
    ) -> None:
        """Hold a request, of which nothing is decided yet. `target`: path and query, as the client wrote them.
        `headers`: header lines for engines (engines.Engines.client_headers). `received`: time.monotonic(). `priority`:
        in the queues of the pools, the smaller the sooner. `incoming`: the request as it came; None for one of the
        proxy's own."""
        self.dialect = dialect
        self.body = body
        self.target = target
        self.request_id = request_id
        self.headers = headers
        self.ask = ask
        self.stages = Stages(received)
        self.priority = priority
        self.incoming = incoming
        self.model = ""
        """As its body names it."""
        self.decision = ""
        """disaggregated, or why one engine did both."""
        self.prefill = self.decode = ""
        """Names of the workers of the last attempt."""
        self.attempts = 0
        self.tried: tuple[str, ...] = ()
        """Names of the workers that failed with it."""
        self.prefill_ticket: Ticket | None = None
        """The place in the prefill pool, given back as soon as the prompt is computed."""

    def copy(self) -> ClientRequest:
        """Return a copy for what goes on when another attempt was made and its answer has begun."""
        return ClientRequest(self.dialect, self.body, self.target, self.request_id, self.headers, self.ask)

    def drop_content(self) -> None:
        """Drop what is sent to an engine: a long answer must not keep a prompt in memory, and its room is another
        request's. What the log and the metrics have of the request stays."""
        self.body = _NO_BODY
        self.headers = b""
        self.ask.drop_prompt()
        if self.incoming is not None:
            self.incoming.drop_content()
