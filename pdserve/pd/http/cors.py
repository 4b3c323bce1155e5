"""Tell browsers which web pages of other origins may ask and read the answers (CORS).

A browser asks first (a preflight: OPTIONS without a key and without a body), then sends the page's own request, and
shows the page an answer only if that names its origin.
"""

from __future__ import annotations

from typing import Final

from pdserve.pd.config.settings import CorsSettings
from pdserve.pd.errors import ApiError
from pdserve.pd.http.incoming import Request
from pdserve.pd.http.reply import Headers
from pdserve.pd.limits.allowed_hosts import ANY

_METHODS: Final = b"GET, POST, OPTIONS"
_SHOWN: Final = b"x-request-id, retry-after"
"""Headers of an answer that a page may read beside those that it always may."""
_MAX_AGE: Final = b"600"
"""Seconds for which a browser need not ask again."""


class Cors:
    """The origins that a recipe names."""

    def __init__(self, settings: CorsSettings) -> None:
        self._any = ANY in settings.origins
        self._origins = {origin.lower().encode("latin-1") for origin in settings.origins}
        self._credentials = settings.credentials

    def allows(self, origin: bytes) -> bool:
        return self._any or origin.lower() in self._origins

    def headers(self, request: Request) -> Headers:
        """Return the headers that every answer to this request has beside its own."""
        origin = request.header(b"origin")
        if self._any and not self._credentials:
            shared: Headers = []
            named = b"*"
        else:
            # A cache must not give one page what was an answer to another one.
            shared = [(b"vary", b"origin")]
            named = origin or b""
        if origin is None or not self.allows(origin):
            return shared
        shared += [(b"access-control-allow-origin", named), (b"access-control-expose-headers", _SHOWN)]
        if self._credentials:
            shared.append((b"access-control-allow-credentials", b"true"))
        return shared

    @staticmethod
    def is_preflight(request: Request) -> bool:
        return (
            request.method == b"OPTIONS"
            and request.header(b"origin") is not None
            and request.header(b"access-control-request-method") is not None
        )

    def refusal(self, preflight: Request) -> ApiError | None:
        """Return why this page may not ask; None: it may."""
        origin = preflight.header(b"origin") or b""
        if self.allows(origin):
            return None
        return ApiError(403, f"The origin {origin[:100].decode('latin-1')!r} is not among proxy.cors.origins.")

    @staticmethod
    def permissions(preflight: Request) -> Headers:
        """Return what a page may send, beside `headers`: all that its request has. What reaches engines is decided
        later."""
        permissions = [(b"access-control-allow-methods", _METHODS), (b"access-control-max-age", _MAX_AGE)]
        asked = preflight.header(b"access-control-request-headers")
        return permissions if asked is None else [*permissions, (b"access-control-allow-headers", asked)]
