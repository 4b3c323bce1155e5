"""Define what a recipe's `proxy:` section and the proxy's own configuration have in common.

Both are made of this one model, so that every setting which a recipe takes reaches the proxy.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from pdserve.pd.config.defaults import HOST
from pdserve.pd.config.routing import RoutingSettings
from pdserve.pd.config.settings import (
    AdminSettings,
    AdmissionSettings,
    AllowedHosts,
    AuthSettings,
    BreakerSettings,
    CorsSettings,
    Count,
    HeaderName,
    HealthSettings,
    LimitsSettings,
    LogFormat,
    OtelSettings,
    Seconds,
    Settings,
    TlsSettings,
    UpstreamTlsSettings,
)


class Serving(Settings):
    """Files are named by path, times are seconds."""

    host: str = Field(default=HOST, description="Address that the proxy listens on.")
    prewarm: bool = Field(
        default=True,
        description="As soon as a prefill and a decode are ready, one token goes through the pair: the handshake of "
        "their KV connectors then is no part of the first request's time to first token.",
    )
    request_timeout_seconds: Seconds = Field(default=3600, description="One request, first byte to last.")
    connect_timeout_seconds: Seconds = Field(default=5, description="Connecting to an engine.")
    on_empty_pool: Literal["wait", "fail", "aggregate"] = Field(
        default="wait",
        description="A request that finds no engine of a role ready. wait: it is answered when one is back, in the "
        "order of arrival; after `hold_seconds` it gets 503 with Retry-After, as at once beyond "
        "`limits.max_buffered_bytes`. fail: 503 with Retry-After at once. aggregate: while one of the two pools is "
        "empty the other one computes prompts and answers by itself.",
    )
    hold_seconds: Seconds = Field(default=60, description="How long a request waits for an engine (`on_empty_pool`).")
    drain_seconds: Seconds = Field(default=30, description="How long running requests may finish at shutdown.")
    max_body_bytes: Count = Field(default=64 * 1024 * 1024, description="Larger request bodies are refused (413).")
    routing: RoutingSettings = Field(default=RoutingSettings(), description="Which worker gets a request.")
    admission: AdmissionSettings = Field(
        default=AdmissionSettings(), description="How many requests are taken, how others wait."
    )
    breaker: BreakerSettings = Field(
        default=BreakerSettings(), description="When the breaker of a failing worker opens."
    )
    health: HealthSettings = Field(default=HealthSettings(), description="The proxy's own checks of its workers.")
    limits: LimitsSettings = Field(default=LimitsSettings(), description="What one client may do to the proxy.")
    allowed_hosts: AllowedHosts = Field(
        default=None,
        description="Names in `Host` and `Origin` by which clients may ask, beside loopback's and `host`; others get "
        "403. For a gateway on this machine that passes its own Host on; web pages of other origins need `cors`. "
        '`["*"]`: any. null: as an empty list for a proxy on loopback without API keys, which web pages could reach; '
        "else any.",
    )
    cors: CorsSettings | None = Field(
        default=None, description="Web pages of other origins that may use the proxy; null: browsers let none."
    )
    forward_headers: list[HeaderName] = Field(
        default=[],
        description="Headers of clients that reach engines, beside traceparent, tracestate, x-session-id, "
        "x-vllm-priority, accept-language and X-Request-Id; `[baggage]`, for example.",
    )
    auth: AuthSettings = Field(
        default=AuthSettings(), description="API keys, and what becomes of a client's Authorization."
    )
    tls: TlsSettings | None = Field(default=None, description="TLS towards clients; null: plain HTTP.")
    upstream_tls: UpstreamTlsSettings | None = Field(
        default=None,
        description="TLS towards workers that are added while serving (`admin`) by an https URL. The deployment's own "
        "engines speak plain HTTP, on loopback or on the nodes' network.",
    )
    admin: AdminSettings | None = Field(
        default=None,
        description="Endpoints that change the running proxy, and /metrics with the series of each API key, which the "
        "clients' port leaves out; null: there are none.",
    )
    log: LogFormat = Field(default="text", description="One line a request, for people or for machines.")
    otel: OtelSettings | None = Field(default=None, description="OpenTelemetry spans; null: none.")
