"""What neither the recipe nor the model states: hardware, links and load, by the user. None: not stated."""

from __future__ import annotations

from pdserve.plan.frozen import Frozen

GIB = 1 << 30


class Given(Frozen):
    """The options of `pdserve plan`."""

    device_gib: float | None = None
    """Memory of one device."""
    kv_gib: float | None = None
    """For KV on each rank: 'Available KV cache memory' of a log."""
    link_gbit: float | None = None
    """Between prefill and decode, bits in 10^9 a second."""
    disk_gb: float | None = None
    """Of the disk that weights are read from, bytes in 10^9 a second, for each node."""
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    prefill_rate: float | None = None
    """Prompt tokens a second of one prefill instance."""
    decode_rate: float | None = None
    """Tokens a second of one decode instance."""
    queue_seconds: float | None = None
    """The longest that a request waits between LMCache's lookup and its load."""


class Span(Frozen):
    """A number, or a range where no single number is known."""

    low: float
    high: float

    @property
    def exact(self) -> bool:
        """Whether both ends are one number."""
        return self.low == self.high
