"""A workload is what a client is asked to send: prompts and answers of a fixed length, or a trace, under a list of
loads."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from pdserve.plan.frozen import Frozen

SloMetric = Literal["ttft", "tpot", "itl", "e2e"]
SLO_MEANING: Mapping[SloMetric, str] = {
    "ttft": "time to first token",
    "tpot": "mean time of a token after the first",
    "itl": "99th percentile of the request's own gaps between chunks",
    "e2e": "time of the whole request",
}
ClientKind = Literal["vllm", "aiperf"]
USUAL_OUTPUT = 128
"""Tokens of an answer whose length a trace does not have."""
USUAL_GRACE = 30.0
"""Seconds that open requests have after those of a load, where it does not state them."""
SESSION_HEADER = "X-Session-ID"
"""The field's name of the header by which a proxy keeps a session on its workers."""


class Workload(Frozen):
    """Holds what is the same for every load of a benchmark."""

    input_tokens: int | None = Field(default=None, ge=1)
    """The input tokens of each prompt; None: the trace has its prompts."""
    output_tokens: int | None = Field(default=None, ge=1)
    """The output tokens of each answer; of a trace, of the answers whose length it does not have."""
    trace: str | None = Field(default=None, min_length=1)
    """A file, or the name of a trace that pdserve makes."""
    trace_digest: str | None = Field(default=None, pattern=r"^[0-9a-f]{64}$")
    """SHA-256 of the trace: another one under the same name is other work."""
    trace_block: int | None = Field(default=None, ge=1)
    """Tokens of a block with a hash id; None: the size that fits all lines."""
    sessions: int | None = Field(default=None, ge=1)
    """The number of the trace's first sessions that are played; None: all."""
    client: ClientKind | None = None
    """None: AIPerf where it is needed."""
    session_header: str | None = Field(default=None, pattern=r"^[A-Za-z0-9-]+$")
    """In which the client names the session; None: X-Session-ID."""
    seed: int = 0
    warmup: int = Field(default=8, ge=0)
    """Requests before each measurement, of a cache salt of their own; without a trace, of prompts of their own too."""
    repeats: int = Field(default=3, ge=1)
    max_failed: float = Field(default=0.0, ge=0, lt=1)
    """Share of requests that may fail."""
    slo: Mapping[SloMetric, float] = {}
    """Milliseconds that a good request takes at most."""

    @model_validator(mode="after")
    def _whole(self) -> Workload:
        if self.trace is not None:
            if self.input_tokens is not None:
                raise ValueError("a trace has its own prompts: leave input_tokens out")
            if self.client == "vllm":
                raise ValueError("vllm bench serve replays no trace: client aiperf does")
            return self
        if self.input_tokens is None or self.output_tokens is None:
            raise ValueError("give input_tokens and output_tokens, or a trace")
        alone = ("trace_digest", "trace_block", "sessions", "session_header")
        if lost := [name for name in alone if getattr(self, name) is not None]:
            raise ValueError(f"{', '.join(lost)}: only for a trace")
        return self

    @property
    def title(self) -> str:
        """Return `1024 in, 128 out`, or the name of the trace."""
        if self.trace is None:
            return f"{self.input_tokens} in, {self.output_tokens} out"
        some = "" if self.sessions is None else f", {self.sessions} sessions"
        return f"trace {Path(self.trace).name}{some}"

    def client_for(self, load: Load) -> ClientKind:
        """Return the client that is chosen, or the one that is needed."""
        return self.client or ("aiperf" if self.trace is not None or load.seconds is not None else "vllm")


class Load(Frozen):
    """Says how many requests there are and how they are sent: at most so many at a time, or so many a second."""

    requests: int = Field(ge=1)
    concurrency: int | None = Field(default=None, ge=1)
    rate: float | None = Field(default=None, gt=0)
    seconds: float | None = Field(default=None, gt=0)
    """After which nothing is sent any more, even if fewer requests were."""
    grace_seconds: float | None = Field(default=None, ge=0)
    """That open requests then have; what is open after that is cut. None: the usual ones."""

    @property
    def grace(self) -> float:
        """Return the grace time in seconds; 0 where the time is not limited."""
        if self.seconds is None:
            return 0.0
        return USUAL_GRACE if self.grace_seconds is None else self.grace_seconds

    @model_validator(mode="after")
    def _possible(self) -> Load:
        if (self.concurrency is None) == (self.rate is None):
            raise ValueError("a load has a concurrency or a rate")
        if self.concurrency is not None and self.requests < self.concurrency:
            raise ValueError(f"{self.requests} requests are never {self.concurrency} at a time")
        if self.grace_seconds is not None and self.seconds is None:
            raise ValueError("grace_seconds is the time after seconds: give both")
        return self

    @property
    def title(self) -> str:
        return f"concurrency {self.concurrency}" if self.rate is None else f"{self.rate:g} requests/s"


_REQUESTS_AT_LEAST, _REQUESTS_EACH = 32, 10


def usual_requests(load: float) -> int:
    """Return how many requests a load has: ten for each that may be open, or ten seconds of a rate; 32 at least:
    percentiles of fewer mean little."""
    return max(_REQUESTS_AT_LEAST, round(_REQUESTS_EACH * load))
