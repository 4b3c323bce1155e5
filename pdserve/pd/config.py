"""What the proxy is told at start: plain data, written to the run directory by the launcher. No secrets."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

WorkerRole = Literal["prefill", "decode", "aggregated"]
Protocol = Literal["mooncake", "nixl", "aggregated"]


class Frozen(BaseModel):
    """Exact keys, never changed."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class WorkerConfig(Frozen):
    """One engine instance as the proxy sees it."""

    name: str
    """The process name in the plan: prefill-0."""
    role: WorkerRole
    url: str
    """http://host:port, without a path."""
    bootstrap_url: str | None = None
    """Mooncake prefill only: http://host:port of its bootstrap server."""


class ProxyConfig(Frozen):
    """The proxy's whole configuration. The engine key comes in the environment (PDSERVE_ENGINE_KEY)."""

    host: str
    port: int
    served_name: str
    protocol: Protocol
    workers: tuple[WorkerConfig, ...]
    request_timeout_seconds: float
    connect_timeout_seconds: float
    drain_seconds: float
    max_body_bytes: int
    transfer_slots: int = 20
    """Mooncake: transfers that one prefill worker runs at once (2 * num_workers)."""
