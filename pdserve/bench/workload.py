"""What a client is asked to send: prompts and answers of a fixed length, under a list of loads."""

from __future__ import annotations

from collections.abc import Mapping
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


class Workload(Frozen):
    """The same for every load of a benchmark."""

    input_tokens: int = Field(ge=1)
    output_tokens: int = Field(ge=1)
    seed: int = 0
    warmup: int = Field(default=8, ge=0)
    """Requests before each measurement, of prompts and a cache salt of their own."""
    repeats: int = Field(default=3, ge=1)
    max_failed: float = Field(default=0.0, ge=0, lt=1)
    """Share of requests that may fail."""
    slo: Mapping[SloMetric, float] = {}
    """Milliseconds that a good request takes at most."""


class Load(Frozen):
    """How many requests, and how they are sent: at most so many at a time, or so many a second."""

    requests: int = Field(ge=1)
    concurrency: int | None = Field(default=None, ge=1)
    rate: float | None = Field(default=None, gt=0)

    @model_validator(mode="after")
    def _possible(self) -> Load:
        if (self.concurrency is None) == (self.rate is None):
            raise ValueError("a load has a concurrency or a rate")
        if self.concurrency is not None and self.requests < self.concurrency:
            raise ValueError(f"{self.requests} requests are never {self.concurrency} at a time")
        return self

    @property
    def title(self) -> str:
        return f"concurrency {self.concurrency}" if self.rate is None else f"{self.rate:g} requests/s"


_REQUESTS_AT_LEAST, _REQUESTS_EACH = 32, 10


def usual_requests(load: float) -> int:
    """Ten for each that may be open, or ten seconds of a rate; 32 at least: percentiles of fewer mean little."""
    return max(_REQUESTS_AT_LEAST, round(_REQUESTS_EACH * load))
