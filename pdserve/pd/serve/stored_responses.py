"""Responses that an engine keeps under an id: they are fetched, cancelled and continued at the engine that has them.

The proxy keeps no record of it. The workers are asked, all at once, when more than one comes into question: the
answer is right in every process of a proxy, after a restart of it, and takes no memory. An id is as good as the engine
makes it: whoever knows it may fetch the response, as at the engine itself.
"""

from __future__ import annotations

import asyncio
import re
from time import monotonic

from pdserve.pd.config.proxy import ProxyConfig
from pdserve.pd.errors import ApiError
from pdserve.pd.http.fetch import FetchError, fetch
from pdserve.pd.http.incoming import Request
from pdserve.pd.protocols.single_engine import SingleEngine
from pdserve.pd.relay.client import Client
from pdserve.pd.relay.entrance import Entrance
from pdserve.pd.requests.body import Body
from pdserve.pd.requests.dialects import CANCEL, RESPONSES, RETRIEVE, Dialect
from pdserve.pd.requests.request import ClientRequest
from pdserve.pd.routing.ask import RoutingRequest
from pdserve.pd.telemetry.spans import Trace
from pdserve.pd.workers.engines import Engines
from pdserve.pd.workers.failure import WorkerFailedError
from pdserve.pd.workers.registry import RETRY_AFTER_SECONDS, Registry, Worker

ATTEMPTS = 2
_ASK_SECONDS = 5.0
_PREFIX = b"/v1/responses/"
_PATH = re.compile(rb"/v1/responses/([A-Za-z0-9_-]{1,256})(/cancel)?")
_ID = re.compile(r"[A-Za-z0-9_-]{1,256}")
_LONGEST_ID = 2048
"""Bytes, as JSON; what is longer is no id."""
_ASKING = 8
"""Fan-outs at once: each takes a connection to every worker."""
_NOTHING = b"{}"


def stored_at(path: bytes) -> Dialect | None:
    """Return the API of a path that names a stored response; None: it names none."""
    if not path.startswith(_PREFIX) or (match := _PATH.fullmatch(path)) is None:
        return None
    return RETRIEVE if match[2] is None else CANCEL


def method_of(dialect: Dialect) -> bytes:
    return b"GET" if dialect is RETRIEVE else b"POST"


class StoredResponses:
    """Requests for a response that an engine keeps."""

    def __init__(self, config: ProxyConfig, registry: Registry, engines: Engines, entrance: Entrance) -> None:
        self._registry, self._engines, self._entrance = registry, engines, entrance
        self._single = SingleEngine(engines)
        self._asking = asyncio.Semaphore(_ASKING)
        self.configure(config)

    def configure(self, config: ProxyConfig) -> None:
        """Take another configuration from now on."""
        self._prefill_answers = config.on_empty_pool == "aggregate"

    def read(
        self, dialect: Dialect, request: Request, request_id: str, trace: Trace | None, received: float
    ) -> ClientRequest:
        """Return a request that names a response in its path: nothing of a body is sent on."""
        headers = request.headers
        if trace is not None:
            headers = [pair for pair in headers if pair[0] != b"traceparent"]
            headers.append((b"traceparent", trace.traceparent.encode()))
        return ClientRequest(
            dialect=dialect,
            body=Body(_NOTHING),
            target=request.target,
            request_id=request_id,
            headers=self._engines.client_headers(headers, request_id),
            ask=RoutingRequest(b"", estimate=1),
            received=received,
            priority=request.key.priority if request.key is not None else 0,
            incoming=request,
        )

    def continues(self, request: ClientRequest) -> bool:
        """Tell whether a request goes on from a stored response, and more than one worker may have that."""
        if request.dialect is not RESPONSES or not 0 < request.body.length("previous_response_id") <= _LONGEST_ID:
            return False
        named = request.body.get("previous_response_id")
        return isinstance(named, str) and _ID.fullmatch(named) is not None and len(self._keepers()) > 1

    async def serve(self, request: ClientRequest, client: Client) -> None:
        """Answers one client. Raises ApiError or ClientGoneError."""
        if request.dialect is RESPONSES:
            named = str(request.body.get("previous_response_id"))
            request.decision = "field:previous_response_id"
        else:
            match = _PATH.fullmatch(request.target.partition(b"?")[0])
            assert match is not None
            named = match[1].decode()
            request.decision = "stored-response"
        keepers = self._keepers()
        if not keepers:
            raise self._registry.no_worker(self._registry.roles[-1])
        worker = keepers[0] if len(keepers) == 1 else await self._keeper_of(named, keepers, request)
        request.decode = worker.name
        roles = (worker.config.role,)
        tickets = await self._entrance.enter([], roles, client, request.priority, request.ask.estimate)
        request.stages.admitted = monotonic()
        try:
            await self._relay(request, client, worker)
        finally:
            for ticket in tickets:
                ticket.release()

    async def _relay(self, request: ClientRequest, client: Client, worker: Worker) -> None:
        """Relay the answer of the only worker that has it: it is asked once more where another one would be."""
        while True:
            request.attempts += 1
            try:
                if request.dialect is RESPONSES:
                    await self._single.attempt(request, client, worker)
                else:
                    await self._single.attempt(request, client, worker, bare=method_of(request.dialect))
            except WorkerFailedError as failure:
                refused = failure.error.status < 500
                if request.attempts == ATTEMPTS or client.started or not failure.retry or refused:
                    raise failure.error from failure
            else:
                return

    def _keepers(self) -> list[Worker]:
        """Return the workers that may have a response. One that drains still has its own."""
        roles = self._registry.roles if self._prefill_answers else self._registry.roles[-1:]
        return [
            worker
            for worker in self._registry.workers.values()
            if worker.config.role in roles and worker.state in ("ready", "draining") and worker.healthy
        ]

    async def _keeper_of(self, named: str, keepers: list[Worker], request: ClientRequest) -> Worker:
        async with self._asking:
            statuses = await asyncio.gather(*(self._status(worker, named, request) for worker in keepers))
        for worker, status in zip(keepers, statuses, strict=True):
            if status == 200:
                return worker
        for worker, status in zip(keepers, statuses, strict=True):
            if status is None or status >= 500:
                raise ApiError(
                    503,
                    f"{worker.name} did not answer whether it has this response.",
                    param="response_id",
                    retry_after=RETRY_AFTER_SECONDS,
                )
            if status in (401, 403):
                # The engine answers that itself, to the client whose key it is.
                return worker
        raise ApiError(
            404, f"Response with id '{named}' not found.", type_="invalid_request_error", param="response_id"
        )

    async def _status(self, worker: Worker, named: str, request: ClientRequest) -> int | None:
        try:
            path = f"/v1/responses/{named}"
            answer = await fetch(worker.pool, "GET", path, headers=request.headers, timeout=_ASK_SECONDS, reuse=True)
        except FetchError:
            return None
        return answer.status
