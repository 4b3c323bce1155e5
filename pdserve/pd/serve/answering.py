"""The life of each request of a client: relayed to engines or answered by the application, counted, and over.

Apart from the gateway, so that it is compiled (hatch_build.py).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from time import monotonic
from typing import Any, Final

from starlette.types import ASGIApp

from pdserve.pd.errors import ApiError, ClientGoneError
from pdserve.pd.http import bridge
from pdserve.pd.http.cors import Cors
from pdserve.pd.http.incoming import Request
from pdserve.pd.http.reply import HttpReply
from pdserve.pd.limits.quotas import QuotaUse
from pdserve.pd.random_id import new_id
from pdserve.pd.relay.client import Client
from pdserve.pd.relay.entrance import Entrance
from pdserve.pd.relay.waiting import Watch
from pdserve.pd.requests.dialects import BY_PATH, CANCEL, CHAT, RESPONSES, RETRIEVE, Dialect, nearest_dialect
from pdserve.pd.requests.request import ClientRequest
from pdserve.pd.serve.accounting import Accounting
from pdserve.pd.serve.intake import Intake
from pdserve.pd.serve.large_bodies import LargeBodies
from pdserve.pd.serve.request_parser import RequestParser, request_id_in, request_id_of
from pdserve.pd.serve.stored_responses import StoredResponses, method_of, stored_at
from pdserve.pd.workers.kv_feeds import KvFeeds
from pdserve.pd.workers.pools import Pools

log = logging.getLogger("pdserve.proxy")

_TOKENS_OF_BYTES: Final = 1_048_576
"""Bodies up to which a prompt's tokens are looked at."""


class Answering:
    """Answers the requests of one proxy process. Each is a task, which is owned here."""

    def __init__(
        self,
        app: ASGIApp,
        intake: Intake,
        parser: RequestParser,
        stored: StoredResponses,
        serve: Callable[[ClientRequest, Client], Awaitable[None]],
        accounting: Accounting,
        pools: Pools,
        feeds: KvFeeds,
        entrance: Entrance,
        cors: Cors | None,
        *,
        served_name: str,
        seconds: float,
    ) -> None:
        """Join what answers requests. `serve` answers a request that is for engines. `seconds`: how long a request may
        take."""
        self._app = app
        self._intake, self._parser, self._stored = intake, parser, stored
        self._serve = serve
        self._accounting = accounting
        self._spans = accounting.spans
        self._pools, self._feeds, self._entrance = pools, feeds, entrance
        self._cors = cors
        self._served_name, self._seconds = served_name, seconds
        self._large_bodies = LargeBodies()
        self._loop = asyncio.get_running_loop()
        self._tasks: dict[Request, asyncio.Task[None]] = {}
        self.clients: set[Client] = set()
        """Those that wait for engines."""

    @property
    def busy(self) -> bool:
        """Tell whether a request is not over."""
        return bool(self._tasks)

    def handle(self, request: Request, reply: HttpReply) -> None:
        """Answer a request (front.Handler)."""
        dialect = BY_PATH.get(request.path)
        method = b"POST"
        if dialect is None:
            dialect = stored_at(request.path)
            if dialect is None:
                if not self._answers_preflight(request, reply):
                    self._start(self._serve_page(request, reply), request)
                return
            method = method_of(dialect)
        if request.method == method:
            self._start(self._answer(dialect, request, reply), request)
        elif not self._answers_preflight(request, reply):
            self.failed(request, reply, ApiError(405, "Method Not Allowed"))
            request.release()

    def failed(self, request: Request | None, reply: HttpReply, error: ApiError) -> None:
        """Answer a request whose body was refused (front.Handler)."""
        self._fail(request, reply, error, request_id_of(request) if request is not None else new_id())

    def _fail(self, request: Request | None, reply: HttpReply, error: ApiError, request_id: str) -> None:
        dialect = None if request is None else BY_PATH.get(request.path) or stored_at(request.path)
        shape = CHAT if request is None else dialect or nearest_dialect(request.path)
        client = Client(reply, request_id, shape)
        client.fail(error)
        path = "other" if dialect is None else dialect.path
        self._accounting.over(None, client, path, error, now=monotonic())

    async def _answer(self, dialect: Dialect, request: Request, reply: HttpReply) -> None:
        received = monotonic()
        client = Client(reply, request_id_of(request), dialect, self._accounting.metrics.itl)
        self.clients.add(client)
        client.deadline = received + self._seconds
        asked: ClientRequest | None = None
        use: QuotaUse | None = None
        parent = request.header(b"traceparent")
        trace = self._spans.begin(parent.decode("latin-1") if parent is not None else None)
        reason: ApiError | ClientGoneError | None = None
        ended = False
        try:
            stored = dialect is RETRIEVE or dialect is CANCEL
            if stored:
                asked = self._stored.read(dialect, request, client.request_id, trace, received)
            else:
                body = self._parser.body(request)
                if body is None:
                    body = await self._large_bodies.read(request, client)
                if "request_id" in body.members and dialect is not RESPONSES:
                    client.request_id = request_id_in(body, request, client.request_id)
                asked = self._intake.read(dialect, request, body, client.request_id, trace, received)
                # The answer may take long, and this frame would keep it.
                body = None
            client.asked = asked
            if request.key is not None:
                use = self._intake.count(request.key)
            if self._pools.needs_tokens and not stored and request.body_bytes <= _TOKENS_OF_BYTES:
                await self._find_tokens(asked, client)
            if stored or self._stored.continues(asked):
                await self._stored.serve(asked, client)
            else:
                await self._serve(asked, client)
            ended = True
        except ApiError as error:
            reason = error
            client.fail(error)
            ended = True
        except ClientGoneError as gone:
            reason = gone
            ended = True
        finally:
            self._over(request, reply, ended, client.request_id)
            if use is not None:
                use.end()
            self.clients.discard(client)
            client.asked = None
            if ended:  # otherwise it is `_broken`'s to count
                key = request.key.name if request.key is not None else ""
                self._accounting.over(asked, client, dialect.path, reason, now=monotonic(), key=key, trace=trace)

    async def _find_tokens(self, asked: ClientRequest, client: Client) -> None:
        """Ask an engine for the prompt's tokens, for policies that look at them; not for a request that gets 429 at
        once."""
        if self._entrance.turns_away(asked.priority, asked.ask.estimate):
            return
        watch = Watch(client, ())
        try:
            found = await watch.race(self._feeds.tokens(asked.dialect, asked.body, self._served_name))
        finally:
            watch.end()
        asked.ask.set_tokens(found)

    def _answers_preflight(self, request: Request, reply: HttpReply) -> bool:
        """Answer a browser's question that goes before a request; return whether it was one."""
        cors = self._cors
        if cors is None or not cors.is_preflight(request):
            return False
        refusal = cors.refusal(request)
        if refusal is not None:
            self.failed(request, reply, refusal)
        else:
            reply.start(204, cors.permissions(request))
            reply.end()
        request.release()
        return True

    async def _serve_page(self, request: Request, reply: HttpReply) -> None:
        ended = False
        try:
            await bridge.serve(self._app, request, reply)
            ended = True
        finally:
            self._over(request, reply, ended, request_id_of(request))

    def _start(self, work: Coroutine[Any, Any, None], request: Request) -> None:
        """Start the work on a request. `work` ends with `_over`: a callback at the end of every task would cost one
        more turn of the loop."""
        self._tasks[request] = self._loop.create_task(work)

    def _over(self, request: Request, reply: HttpReply, ended: bool, request_id: str) -> None:
        """End a task's work. `ended`: as it should, or with an error that its client has got."""
        task = self._tasks.pop(request)
        request.release()
        if not ended:
            task.add_done_callback(partial(self._broken, request, reply, request_id))

    def _broken(self, request: Request, reply: HttpReply, request_id: str, task: asyncio.Task[None]) -> None:
        """Answer what was not expected: nothing may leave a client without an end."""
        if task.cancelled() or (error := task.exception()) is None:
            return
        log.error("%s failed", request.path.decode("latin-1"), exc_info=error)
        if not reply.ended:
            self._fail(request, reply, ApiError(500, f"The proxy failed: {type(error).__name__}"), request_id)
