"""A client's request on its way through the proxy."""

from __future__ import annotations

from dataclasses import dataclass, field

from pdserve.pd.limits.admission import Ticket
from pdserve.pd.requests.body import Body
from pdserve.pd.requests.dialects import Dialect
from pdserve.pd.routing.ask import RoutingRequest


@dataclass(slots=True)
class Stages:
    """Values of time.monotonic() at which a request reached each stage; 0: it did not."""

    received: float = 0.0
    admitted: float = 0.0
    prefilled: float = 0.0
    """Prefill has answered: the KV of the prompt is there."""
    decoding: float = 0.0
    """Decode's answer has begun: the KV has arrived."""


@dataclass(slots=True)
class ClientRequest:
    """What is sent on, what routing may look at, and what became of it: the line in the log, the spans, the metrics."""

    dialect: Dialect
    body: Body
    target: bytes
    """Path and query, as the client wrote them."""
    request_id: str
    headers: bytes
    """Header lines for engines (engines.Engines.client_headers)."""
    ask: RoutingRequest
    stages: Stages = field(default_factory=Stages)
    decision: str = ""
    """disaggregated, or why one engine did both."""
    prefill: str = ""
    decode: str = ""
    """Names of the workers of the last attempt."""
    attempts: int = 0
    priority: int = 0
    """In the queues of the pools: the smaller the sooner."""
    prefill_ticket: Ticket | None = None
    """The place in the prefill pool, given back as soon as the prompt is computed."""
