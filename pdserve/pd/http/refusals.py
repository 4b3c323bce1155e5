"""Refuse requests before their body is read, with what is wrong."""

from __future__ import annotations

from typing import Final

from pdserve.pd.errors import ApiError
from pdserve.pd.http.incoming import Request

MAX_HEADERS: Final = 256
"""Of one request: each takes far more memory than its bytes."""
RETRY_SECONDS: Final = 1
NO_PLACE: Final = (
    b"HTTP/1.1 503 Service Unavailable\r\nretry-after: %d\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
    % RETRY_SECONDS
)
"""For a connection that nothing is read from."""
_ONCE: Final = (b"host", b"content-length", b"transfer-encoding")
"""Headers that decide who is asked and where a request ends."""


def refuse_head(request: Request, version: str, max_body_bytes: int) -> ApiError | None:
    """Return what is wrong with a request's head, as HTTP defines it; None: nothing, and `announced` is known."""
    named = request.named()
    if named.get(b"host") is None if version == "1.1" else version != "1.0":
        return ApiError(400, "This is not a valid HTTP/1.1 request: it needs one Host header.")
    coding = named.get(b"transfer-encoding")
    if coding is not None and (version != "1.1" or coding.lower() != b"chunked"):
        return ApiError(400, "The only transfer coding of a request may be chunked.")
    if len(named) < len(request.headers):
        names = [name for name, _ in request.headers]
        if any(names.count(name) > 1 for name in _ONCE):
            return ApiError(400, "This is not a valid HTTP/1.1 request: a header comes twice that may come once.")
    length = named.get(b"content-length")
    if length is not None:
        request.announced = int(length)
        if request.announced > max_body_bytes:
            return too_large(max_body_bytes)
    return None


def too_large(most: int) -> ApiError:
    return ApiError(413, f"The request body is larger than {most} bytes.")


def headers_too_large() -> ApiError:
    return ApiError(431, "The request's headers are too large.")


def only_probes() -> ApiError:
    return ApiError(503, "The proxy has as many clients as it may have.", retry_after=RETRY_SECONDS)


def no_memory() -> ApiError:
    return ApiError(503, "The proxy holds too many large requests at the moment.", retry_after=RETRY_SECONDS)
