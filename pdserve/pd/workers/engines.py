"""Write what every request to an engine has: its request line, and the headers that the engine may see."""

from __future__ import annotations

import ssl
from collections.abc import Iterable
from typing import Final

from pdserve.errors import RecipeError
from pdserve.pd.config.settings import UpstreamTlsSettings
from pdserve.pd.http.pieces import Payload
from pdserve.pd.workers.registry import Worker

PASSED_ON: Final = frozenset((b"traceparent", b"tracestate", b"x-session-id", b"x-vllm-priority", b"accept-language"))
"""The headers of a client that reach an engine, beside those that a recipe names (`proxy.forward_headers`). Ranks are
ours to choose, and no client may claim an address."""


class Engines:
    """Makes the heads of requests. `key` is the deployment's; `authorization` says what becomes of the client's own;
    `forward` are names of headers that engines get beside PASSED_ON."""

    def __init__(self, key: str | None, authorization: str = "replace", forward: Iterable[str] = ()) -> None:
        self._key = b"authorization: Bearer %b\r\n" % key.encode() if key else b""
        self._authorization = authorization
        self._passed_on = PASSED_ON.union(name.lower().encode() for name in forward)

    @property
    def key_header(self) -> bytes:
        return self._key

    def client_headers(self, headers: Iterable[tuple[bytes, bytes]], request_id: str, *, ours: bool = False) -> bytes:
        """The lines that both legs of a request carry. `ours`: it is the proxy's own request."""
        lines = [b"x-request-id: " + request_id.encode("latin-1") + b"\r\n"]
        forwarded = b""
        for name, value in headers:
            if name in self._passed_on:
                lines.append(name + b": " + value + b"\r\n")
            elif name == b"authorization" and not forwarded:
                forwarded = b"authorization: %b\r\n" % value
        if ours or self._authorization == "replace":
            lines.append(self._key)
        elif self._authorization == "forward":
            lines.append(forwarded)
        return b"".join(lines)

    @staticmethod
    def renamed(headers: bytes, request_id: str) -> bytes:
        """Lines of `client_headers`, with another request id."""
        _, _, others = headers.partition(b"\r\n")
        return b"x-request-id: %b\r\n%b" % (request_id.encode("latin-1"), others)

    @staticmethod
    def bare(worker: Worker, method: bytes, path: bytes, headers: bytes) -> bytes:
        """The head of a request without a body."""
        length = b"" if method == b"GET" else b"content-length: 0\r\n"
        return b"%b %b HTTP/1.1\r\nhost: %b\r\naccept-encoding: identity\r\n%b%b\r\n" % (
            method,
            path,
            worker.pool.host_header,
            headers,
            length,
        )

    @staticmethod
    def post(worker: Worker, path: bytes, headers: bytes, body: Payload) -> bytes:
        """The head of one request."""
        return b"".join(
            (
                b"POST ",
                path,
                b" HTTP/1.1\r\nhost: ",
                worker.pool.host_header,
                b"\r\ncontent-type: application/json\r\naccept-encoding: identity\r\n",
                headers,
                b"content-length: ",
                str(len(body)).encode(),
                b"\r\n\r\n",
            )
        )


def upstream_tls(settings: UpstreamTlsSettings | None) -> ssl.SSLContext | None:
    """Return the context for workers whose URL is https. RecipeError: a file that is named cannot be used."""
    if settings is None:
        return None
    try:
        context = ssl.create_default_context(cafile=settings.ca)
        if settings.certificate is not None:
            context.load_cert_chain(settings.certificate, settings.key)
    except (OSError, ssl.SSLError) as error:
        raise RecipeError(
            f"the TLS files for the workers cannot be used: {error}", where="proxy.upstream_tls"
        ) from error
    if not settings.verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context
