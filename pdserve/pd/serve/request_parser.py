"""Parse what a client asks for, out of its body and headers, into the request as the rest of the proxy has it."""

from __future__ import annotations

import re
from typing import Final

from pdserve.pd.config.proxy import ProxyConfig
from pdserve.pd.errors import ApiError, bad_request
from pdserve.pd.http.incoming import Request
from pdserve.pd.limits.admission import MAX_PRIORITY
from pdserve.pd.random_id import new_id
from pdserve.pd.requests.body import EASY_BYTES, FEW_BYTES, Body, members_at_once
from pdserve.pd.requests.dialects import Dialect
from pdserve.pd.requests.encodings import ENCODED_BYTES, as_utf8
from pdserve.pd.requests.long_value import LONG_BYTES, members_around_long
from pdserve.pd.requests.request import ClientRequest
from pdserve.pd.routing.ask import RoutingRequest
from pdserve.pd.routing.block_hash import SALTED, SECRET, digest
from pdserve.pd.telemetry.spans import Trace
from pdserve.pd.workers.engines import Engines

REQUEST_ID: Final = re.compile(rb"[\x21-\x7e]{1,256}")
_INTEGER: Final = re.compile(rb"-?[0-9]{1,9}")
_BYTES_PER_TOKEN: Final = 4
_LONGEST_SESSION: Final = 1024
_LONGEST_PRIORITY: Final = 16
_LARGEST_EXTRA: Final = 65_536
_LONGEST_ID: Final = 2048
"""Bytes, as JSON."""
_PLAIN: Final = b"application/json"
_ENGINE_PRIORITY: Final = b"x-vllm-priority"


class RequestParser:
    """Makes a ClientRequest of a request's headers and body."""

    def __init__(self, config: ProxyConfig, engines: Engines) -> None:
        self._engines = engines
        self.configure(config)

    def configure(self, config: ProxyConfig) -> None:
        """Take another configuration from now on."""
        self._affinity = config.routing.affinity
        self._priority_header = (config.admission.priority_header or "").encode()

    def body(self, request: Request) -> Body | None:
        """Read the request's body; None: it is so large that it must be read in steps (serve.large_bodies). Raises
        ApiError 400 for what is no JSON object."""
        content_type = request.header(b"content-type")
        if content_type != _PLAIN and not _is_json(content_type):
            raise not_json()
        if request.body_bytes > EASY_BYTES:
            return None
        raw = request.body
        if not raw.startswith(b'{"'):
            raw = as_utf8(raw, whole=len(raw) <= ENCODED_BYTES)
        members = members_around_long(raw) if len(raw) >= LONG_BYTES else None
        if members is None and len(raw) > FEW_BYTES:
            members = members_at_once(raw)
            if members is None:
                return None
        return Body(raw, members=members)

    def read(
        self, dialect: Dialect, request: Request, body: Body, request_id: str, trace: Trace | None, received: float
    ) -> ClientRequest:
        prompt, begin, end = dialect.prompt(body)
        size = end - begin
        if len(body.raw) > _LARGEST_EXTRA:
            if body.length("vllm_xargs") > _LARGEST_EXTRA:
                raise bad_request(f"vllm_xargs is larger than {_LARGEST_EXTRA} bytes.", "vllm_xargs")
            size = sum([body.length(name) for name in dialect.prompt_fields])
        headers = request.headers
        if trace is not None:
            headers = [pair for pair in headers if pair[0] != b"traceparent"]
            headers.append((b"traceparent", trace.traceparent.encode()))
        priority = self._priority(request, body)
        if request.key is not None:
            # The engine's own queue must not give what the key does not.
            best = request.key.priority
            if request.header(_ENGINE_PRIORITY) is not None:
                headers = [pair for pair in headers if pair[0] != _ENGINE_PRIORITY or not _better(pair[1], best)]
            if "priority" in body.members and _better(body.beginning(("priority",), _LONGEST_PRIORITY), best):
                body = body.replaced("priority", b"%d" % best)
        return ClientRequest(
            dialect=dialect,
            body=body,
            target=request.target,
            request_id=request_id,
            headers=self._engines.client_headers(headers, request_id),
            ask=RoutingRequest(
                prompt,
                begin,
                end,
                estimate=max(1, size // _BYTES_PER_TOKEN),
                session=self._session(request, body),
                root=_root(body) if "cache_salt" in body.members else SECRET,
            ),
            received=received,
            priority=priority,
            incoming=request,
        )

    def _session(self, request: Request, body: Body) -> str | None:
        affinity = self._affinity
        if affinity is None:
            return None
        named = request.header(affinity.header.encode()) if affinity.header else None
        if named is None and affinity.body_user and body.begins("user") == b'"':
            # The beginning of a longer one is enough.
            named = body.beginning(("user",), _LONGEST_SESSION)
        return None if named is None else named.decode("latin-1")

    def _priority(self, request: Request, body: Body) -> int:
        best = request.key.priority if request.key is not None else 0
        asked = request.header(self._priority_header) if self._priority_header else None
        if asked is None and "priority" in body.members:
            asked = body.beginning(("priority",), _LONGEST_PRIORITY)
        if asked is None:
            return best
        return priority_of(int(asked) if _INTEGER.fullmatch(asked) else None, best)


def _root(body: Body) -> int:
    """Return the root of the prompt's blocks, by its cache_salt as it was sent. What is no text, as null, is none."""
    begin, end = body.place("cache_salt")
    if body.raw[begin : begin + 1] != b'"':
        return SECRET
    return digest(body.raw, memoryview(body.raw), begin, end, SALTED)


def _better(asked: bytes | None, best: int) -> bool:
    """Return whether a client asks for more than its key's best priority; the smaller the sooner."""
    return asked is not None and (not _INTEGER.fullmatch(asked) or int(asked) < best)


def _is_json(content_type: bytes | None) -> bool:
    """Return whether a content type is JSON, as vLLM sees it."""
    return content_type is not None and content_type.lower().split(b";", 1)[0] == _PLAIN


def not_json() -> ApiError:
    """Return the error of a body that is not JSON, in vLLM's words."""
    message = "1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed"
    return ApiError(400, message, type_="Bad Request")


def request_id_of(request: Request) -> str:
    """Return the client's own request id, if it is printable and not too long; else a new one."""
    given = request.header(b"x-request-id")
    if given is not None and REQUEST_ID.fullmatch(given):
        return given.decode("ascii")
    return new_id()


def request_id_in(body: Body, request: Request, otherwise: str) -> str:
    """Return the name of a request as vLLM does: a `request_id` in the body names it where no header does."""
    if request.header(b"x-request-id") is None and body.length("request_id") <= _LONGEST_ID:
        given = body.get("request_id")
        if isinstance(given, str) and given.isascii() and REQUEST_ID.fullmatch(given.encode()):
            return given
    return otherwise


def priority_of(asked: int | None, best: int) -> int:
    """Return the priority of a request; the smaller the sooner. `best`: what the client's key allows, and gives when
    nothing is asked."""
    if asked is None:
        return best
    return max(best, min(asked, MAX_PRIORITY))
