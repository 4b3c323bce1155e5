"""Take in each request before anything waits: refuse it by its head, read it, count it against its key's limits.

Apart from the gateway, so that it is compiled (hatch_build.py).
"""

from __future__ import annotations

from typing import Final

from pdserve.pd.errors import ApiError, no_route
from pdserve.pd.http.cors import Cors
from pdserve.pd.http.incoming import Request
from pdserve.pd.limits.allowed_hosts import AllowedHosts
from pdserve.pd.limits.api_keys import ApiKey
from pdserve.pd.limits.keys import KeyFile
from pdserve.pd.limits.quotas import Quotas, QuotaUse
from pdserve.pd.requests.body import Body
from pdserve.pd.requests.dialects import BY_PATH, CANCEL, Dialect
from pdserve.pd.requests.request import ClientRequest
from pdserve.pd.requests.served_models import ServedModels
from pdserve.pd.serve.request_parser import RequestParser
from pdserve.pd.serve.stored_responses import stored_at
from pdserve.pd.telemetry.metrics import Metrics
from pdserve.pd.telemetry.spans import Trace

WITHOUT_KEY: Final = frozenset((b"/health", b"/ready", b"/ping", b"/metrics"))
"""For probes and Prometheus, which have no key of a client."""
PAGES: Final = frozenset((*WITHOUT_KEY, b"/workers", b"/load", b"/version", b"/v1/models"))
"""What the application answers, to GET and without a body."""


class Intake:
    """The checks of a request that need no waiting: head, key, model, limits of its key."""

    def __init__(
        self,
        hosts: AllowedHosts | None,
        keys: KeyFile | None,
        quotas: Quotas | None,
        served: ServedModels,
        parser: RequestParser,
        metrics: Metrics,
        cors: Cors | None,
    ) -> None:
        """Join the checks of a request. `hosts` None: any is allowed. `keys` and `quotas` None: no key is asked for.
        `cors` None: no web page of another origin is named."""
        self._hosts, self._keys, self._quotas, self._cors = hosts, keys, quotas, cors
        self._served, self._parser, self._metrics = served, parser, metrics

    def refuse(self, request: Request) -> ApiError | None:
        """Return why a request is not answered, as far as its head shows it. Its key is known afterwards."""
        hosts = self._hosts
        if hosts is not None:
            host, origin = request.header(b"host"), request.header(b"origin")
            if host not in hosts.seen or origin is not None:
                if origin is not None and self._cors is not None and self._cors.allows(origin):
                    origin = None
                stranger = hosts.refusal(host, origin)
                if stranger is not None:
                    return stranger
        path = request.path
        if self._keys is not None and path not in WITHOUT_KEY:
            try:
                request.key = self._keys.current.identify(
                    request.header(b"authorization"), request.header(b"x-api-key")
                )
            except ApiError as error:
                if self._cors is not None and self._cors.is_preflight(request):
                    return None  # browsers ask without a key
                self._metrics.count("unauthorized")
                return error
        asked = path in BY_PATH
        if (not asked or request.method != b"POST") and request.has_body():
            stored = stored_at(path)
            if stored is CANCEL and request.method == b"POST":
                return None
            known = asked or stored is not None or path in PAGES
            return ApiError(405, "Method Not Allowed") if known else no_route(path.decode("latin-1"))
        return None

    def read(
        self, dialect: Dialect, request: Request, body: Body, request_id: str, trace: Trace | None, received: float
    ) -> ClientRequest:
        """Read a request of a client. Raises ApiError when the proxy refuses it, or every engine would."""
        model = self._served.check(dialect, body)
        asked: ClientRequest = self._parser.read(dialect, request, body, request_id, trace, received)
        asked.model = model
        return asked

    def count(self, key: ApiKey) -> QuotaUse | None:
        """Count a request against the limits of its key; raises ApiError 429 when it has reached one."""
        return None if self._quotas is None else self._quotas.enter(key)
