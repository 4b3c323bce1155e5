"""What is wrong with a request that is refused before anybody looks at what it asks for."""

from __future__ import annotations

from pdserve.pd.errors import ApiError
from pdserve.pd.http.incoming import Request

MAX_HEADERS = 256
"""Of one request: each takes far more memory than its bytes."""
RETRY_SECONDS = 1
_ONCE = (b"host", b"content-length", b"transfer-encoding")
"""Headers that decide who is asked and where a request ends."""


def no_host() -> ApiError:
    return ApiError(400, "This is not a valid HTTP/1.1 request: it needs one Host header.")


def other_coding() -> ApiError:
    return ApiError(400, "The only transfer coding of a request may be chunked.")


def repeated(request: Request) -> ApiError | None:
    """A header comes twice that must not."""
    names = [name for name, _ in request.headers]
    if all(names.count(name) < 2 for name in _ONCE):
        return None
    return ApiError(400, "This is not a valid HTTP/1.1 request: a header comes twice that may come once.")


def too_large(most: int) -> ApiError:
    return ApiError(413, f"The request body is larger than {most} bytes.")


def headers_too_large() -> ApiError:
    return ApiError(431, "The request's headers are too large.")


def no_memory() -> ApiError:
    return ApiError(503, "The proxy holds too many large requests at the moment.", retry_after=RETRY_SECONDS)
