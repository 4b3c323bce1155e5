"""The settings that a recipe's `proxy:` section and the proxy's own configuration share, each described once.

Plain data without secrets: keys and tokens are files, named by path. Times are seconds.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError

Seconds = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(gt=0, le=1)]


class Settings(BaseModel):
    """Unknown keys and wrong types are errors; never changed."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class PoolLimits(Settings):
    """Limits of what one pool takes at once, and of how requests wait for it; null: no limit."""

    max_requests: Count | None = Field(default=None, description="Requests in flight, for each ready worker.")
    max_kv_usage: Share | None = Field(
        default=None, description="No new request while every worker of the pool uses more of its KV cache than this."
    )
    max_prompt_tokens_in_flight: Count | None = Field(
        default=None,
        description="Prompt tokens in flight (estimated), for each ready worker. One request alone always fits: one "
        "that is larger than this waits for an empty pool, and those behind it wait with it.",
    )
    queue_size: Annotated[int, Field(ge=0)] = Field(
        default=512, description="Requests that may wait for a place; beyond them 429. 0: no request waits."
    )
    queue_seconds: Seconds = Field(default=60, description="How long a request may wait before it gets 429.")


class AdmissionSettings(Settings):
    """The number of requests that each pool takes."""

    prefill: PoolLimits = Field(default=PoolLimits(), description="Limits of the prefill pool.")
    decode: PoolLimits = Field(default=PoolLimits(), description="Limits of the decode pool.")
    aggregated: PoolLimits = Field(default=PoolLimits(), description="Limits of the pool of mode aggregated.")
    priority_header: str | None = Field(
        default="x-vllm-priority",
        min_length=1,
        description="Header with a whole number, the smaller the sooner, as vLLM's own `priority` in a body, which "
        "counts where the header is missing. A key's `priority` is the best its requests can get. null: no header.",
    )


class BreakerSettings(Settings):
    """The breaker of a failing worker. It opens after failures; these count: no connection; a canary (one token of
    nobody's) that failed; a request that failed and that another worker then answered, unless this one has answered any
    for `open_seconds`. Long before that, a worker that only fails gets no request while another one may be used."""

    failures: Count = Field(default=5, description="Failures in a row after which the breaker opens.")
    open_seconds: Seconds = Field(
        default=10,
        description="How long it stays open, before a canary tries the worker; and the longest pause between two "
        "canaries to a worker that fails.",
    )


class HealthSettings(Settings):
    """The proxy's own checks of its workers, beside the states that the launcher sends."""

    interval_seconds: Seconds = Field(default=2, description="Between two checks of one worker.")
    timeout_seconds: Seconds = Field(default=2, description="A check that takes longer has failed.")
    failures: Count = Field(default=3, description="Failed checks in a row after which a worker is not used.")


class LimitsSettings(Settings):
    """Limits of what one client may do to the proxy. `max_body_bytes` stands beside this section."""

    max_header_bytes: Count = Field(default=65_536, description="Request line and headers; larger ones get 431.")
    header_seconds: Seconds = Field(default=10, description="From the first byte of a request to its last header.")
    body_idle_seconds: Seconds = Field(
        default=30,
        description="The longest pause within a request body. A client that is behind with its answer may read nothing "
        "for as long, at most twice as long.",
    )
    body_seconds: Seconds = Field(
        default=300,
        description="How long a request body may take to arrive, and a client that is behind with its answer to catch "
        "up.",
    )
    keep_alive_seconds: Seconds = Field(default=75, description="How long a connection may stay without a request.")
    max_connections: Count = Field(
        default=8192,
        description="Open client connections of one process, as far as its limit of open files leaves room for them "
        "beside those to engines. A further one takes the place of one on which nothing is being answered, of the "
        "client address with the most of them. If there is none, /health, /ready, /ping and /metrics are still "
        "answered on 16 more, and everything else gets 503.",
    )
    max_buffered_bytes: Count | None = Field(
        default=None,
        description="Bytes of requests in the memory of one process, each until its answer is sent on. A request may "
        "be as large as what is left beside it of seven eighths; the last eighth is for those of up to 64 KiB. Others "
        "get 503. null: eight times `max_body_bytes`.",
    )
    write_buffer_bytes: Count = Field(
        default=262_144, description="Unsent bytes of one client after which its worker is no longer read."
    )


class AuthSettings(Settings):
    """The clients that may ask, and what becomes of their Authorization header."""

    keys_file: str | None = Field(
        default=None,
        min_length=1,
        description="API keys as hashes, with their limits (`pdserve new-key`); read again when it changes. "
        "null: the proxy asks for no key. The deployment's engine key is always valid: its launcher and `verify` ask "
        "with it.",
    )
    client_authorization: Literal["replace", "drop", "forward"] = Field(
        default="replace",
        description="What engines get to see. replace: the deployment's engine key. drop: no Authorization. forward: "
        "the client's own header, byte for byte.",
    )


class TlsSettings(Settings):
    """TLS towards clients."""

    certificate: str = Field(min_length=1, description="PEM file: the certificate and its chain.")
    key: str = Field(min_length=1, description="PEM file: the private key, without a passphrase.")


class UpstreamTlsSettings(Settings):
    """TLS towards workers, for those whose URL is https."""

    ca: str | None = Field(default=None, min_length=1, description="PEM file of accepted CAs; null: the system's.")
    certificate: str | None = Field(default=None, min_length=1, description="PEM file: our own certificate (mTLS).")
    key: str | None = Field(default=None, min_length=1, description="PEM file: the key of our own certificate.")
    verify: bool = Field(default=True, description="false: any certificate is accepted.")


class AdminSettings(Settings):
    """Endpoints that change the running proxy: workers, and reloading keys and policies; and /metrics with the figures
    of each API key, which the clients' port does not name. Never on the clients' port."""

    port: Annotated[int, Field(ge=1, le=65535)] | None = Field(default=None, description="TCP port; or `socket`.")
    host: str = Field(default="127.0.0.1", min_length=1, description="Address that the port is on.")
    socket: str | None = Field(
        default=None, min_length=1, description="Path of a unix socket, made with mode 0600; or `port`."
    )
    token_file: str | None = Field(
        default=None,
        min_length=1,
        description="File with the bearer token that callers must send; null: any caller may do everything.",
    )


class OtelSettings(Settings):
    """OpenTelemetry spans; needs the extra `pdserve[otel]`."""

    endpoint: str = Field(pattern=r"^https?://", description="OTLP over HTTP: http://collector:4318/v1/traces.")
    sample_ratio: Annotated[float, Field(ge=0, le=1)] = Field(
        default=1.0, description="Share of requests that get spans when no `traceparent` has decided about them."
    )


_ORIGIN = re.compile(r"\*|[A-Za-z][A-Za-z0-9+.-]*://[^/\s]+")
_HEADER_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")


def _origin(text: str) -> str:
    if _ORIGIN.fullmatch(text) is None:
        raise PydanticCustomError("origin", "an origin as browsers send it, https://chat.example, or *")
    return text


class CorsSettings(Settings):
    """Web pages of other origins that may ask the proxy and read its answers (CORS)."""

    origins: list[Annotated[str, AfterValidator(_origin)]] = Field(
        min_length=1,
        description="Origins as browsers send them: `https://chat.example`, `http://localhost:3000`. They pass the "
        'check of `Origin` that `allowed_hosts` describes. `["*"]`: any page, also those that a user of this machine '
        "opens by chance; give the proxy keys then (`auth.keys_file`).",
    )
    credentials: bool = Field(
        default=False,
        description="Pages may send cookies and client certificates, for a gateway in front that asks for them. API "
        "keys in `Authorization` need it not.",
    )


OWN_HEADERS = frozenset(
    (
        *("host", "content-length", "content-type", "transfer-encoding", "connection", "keep-alive", "te", "trailer"),
        *("upgrade", "expect", "accept-encoding", "proxy-authorization", "proxy-connection"),
        *("authorization", "x-api-key", "x-request-id", "x-data-parallel-rank"),
    )
)
"""Headers that frame a request to an engine, or that the proxy decides itself."""


def _header_name(name: str) -> str:
    if _HEADER_NAME.fullmatch(name) is None or name.lower() in OWN_HEADERS:
        what = "the name of a header that the proxy does not send itself (Authorization: auth.client_authorization)"
        raise PydanticCustomError("header_name", what)
    return name


HeaderName = Annotated[str, AfterValidator(_header_name)]
LogFormat = Literal["text", "json"]
AllowedHosts = list[Annotated[str, Field(min_length=1)]] | None
