"""What the proxy is told at start: plain data, written to the run directory by the launcher. No secrets.

Every section has defaults: a configuration that names only addresses, workers and timeouts is complete.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from pdserve.pd.routing_settings import Routing
from pdserve.pd.settings import (
    Admin,
    Admission,
    AllowedHosts,
    Auth,
    Breaker,
    Health,
    Limits,
    LogFormat,
    Otel,
    Tls,
    UpstreamTls,
)

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
    ranks: Annotated[int, Field(ge=1)] = 1
    """Data-parallel engines behind the URL."""
    kv_events_url: str | None = None
    """tcp://host:port where the engine publishes its KV events; the port of DP rank 0, others follow."""
    kv_replay_url: str | None = None
    """tcp://host:port where events that were missed can be asked for again."""


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
    kv_lease_seconds: Annotated[float, Field(gt=0)] = 30
    """NIXL: how long a prefill keeps KV that no decode has asked for (kv_lease_duration)."""
    processes: Annotated[int, Field(ge=1)] = 1
    """Proxy processes that share the port, the load figures and the limits (`proxy.workers` of a recipe)."""
    prewarm: bool = True
    """One token goes through every pair of prefill and decode as soon as both are ready."""
    routing: Routing = Routing()
    admission: Admission = Admission()
    breaker: Breaker = Breaker()
    health: Health = Health()
    limits: Limits = Limits()
    allowed_hosts: AllowedHosts = None
    auth: Auth = Auth()
    tls: Tls | None = None
    upstream_tls: UpstreamTls | None = None
    admin: Admin | None = None
    log: LogFormat = "text"
    otel: Otel | None = None
