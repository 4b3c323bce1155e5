"""The `proxy:` section: the process that clients talk to. Its parts are those of the proxy's own configuration."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

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
from pdserve.recipe.base import Count, Seconds, Strict
from pdserve.recipe.restart import Restart


class Proxy(Strict):
    """The prefill/decode proxy: what clients talk to."""

    kind: Literal["pdserve", "vllm-router"] = Field(
        default="pdserve",
        description="Which proxy: pdserve's own, or the official Rust router (`pip install 'pdserve[router]'`), which "
        "has fewer of these settings; see docs/vllm-router.md.",
    )
    host: str = Field(default="127.0.0.1", description="Address that the proxy listens on.")
    prewarm: bool = Field(
        default=True,
        description="As soon as a prefill and a decode are ready, one token goes through the pair: the handshake of "
        "their KV connectors then is no part of the first request's time to first token.",
    )
    workers: Count = Field(
        default=1,
        description="Processes that share the port and one view of load and limits; one keeps one core busy.",
    )
    request_timeout_seconds: Seconds = Field(default=3600, description="One request, first byte to last.")
    connect_timeout_seconds: Seconds = Field(default=5, description="Connecting to an engine.")
    drain_seconds: Seconds = Field(default=30, description="How long running requests may finish at shutdown.")
    max_body_bytes: Count = Field(default=64 * 1024 * 1024, description="Larger request bodies are refused (413).")
    routing: Routing = Field(default=Routing(), description="Which worker gets a request.")
    admission: Admission = Field(default=Admission(), description="How many requests are taken, how others wait.")
    breaker: Breaker = Field(default=Breaker(), description="When a worker that fails is left alone.")
    health: Health = Field(default=Health(), description="The proxy's own checks of its workers.")
    limits: Limits = Field(default=Limits(), description="What one client may do to the proxy.")
    allowed_hosts: AllowedHosts = Field(
        default=None,
        description="Names in `Host` and `Origin` by which clients may ask, beside loopback's and `host`; others get "
        '403. For a gateway on this machine that passes its own Host on, and for web pages. `["*"]`: any. null: as an '
        "empty list for a proxy on loopback without API keys, which web pages could reach; else any.",
    )
    auth: Auth = Field(default=Auth(), description="API keys, and what becomes of a client's Authorization.")
    tls: Tls | None = Field(default=None, description="TLS towards clients; null: plain HTTP.")
    upstream_tls: UpstreamTls | None = Field(
        default=None,
        description="TLS towards workers that are added while serving (`admin`) by an https URL. The deployment's own "
        "engines speak plain HTTP, on loopback or on the nodes' network.",
    )
    admin: Admin | None = Field(
        default=None, description="Endpoints that change the running proxy; null: there are none."
    )
    log: LogFormat = Field(default="text", description="One line a request, for people or for machines.")
    otel: Otel | None = Field(default=None, description="OpenTelemetry spans; null: none.")
    restart: Restart = Field(
        default=Restart(policy="on-failure"),
        description="The proxy keeps no state and starts in a second, so it is restarted by default.",
    )
    command: list[str] | None = Field(
        default=None, min_length=1, description="Replaces `python -m pdserve.proxy`, or `vllm-router`."
    )
