"""From a request to the workers that answer it: split or not, which of them, and what to try when one fails.

An attempt that fails before the first byte because of a worker is made again at once with other workers: a new
transfer and both legs anew. workers/judgement.py has the rule for how often, and for what that says of a worker.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Collection
from functools import partial
from time import monotonic
from typing import Final, Protocol

from pdserve.pd.config.proxy import ProxyConfig
from pdserve.pd.protocols.background import Background
from pdserve.pd.protocols.mooncake import MooncakeProtocol
from pdserve.pd.protocols.moriio import MoriioProtocol
from pdserve.pd.protocols.nixl import NixlProtocol
from pdserve.pd.protocols.nixl_push import UNSPLIT, NixlPushProtocol
from pdserve.pd.protocols.single_engine import SingleEngine
from pdserve.pd.relay.client import Client
from pdserve.pd.relay.entrance import Entrance
from pdserve.pd.requests.request import ClientRequest
from pdserve.pd.workers.engines import Engines
from pdserve.pd.workers.failure import WorkerFailedError
from pdserve.pd.workers.judgement import Inquiry
from pdserve.pd.workers.pools import Pools
from pdserve.pd.workers.registry import Registry, Worker
from pdserve.roles import EngineRole

log = logging.getLogger("pdserve.proxy")

DISAGGREGATED: Final = "disaggregated"

Attempt = Callable[[list[Worker]], Awaitable[None]]


class Split(Protocol):
    """A P/D protocol."""

    background: Background

    async def attempt(self, request: ClientRequest, client: Client, prefill: Worker, decode: Worker) -> None: ...


class Dispatcher:
    """Chooses workers for a request, and tries again with others when an attempt fails."""

    def __init__(
        self, config: ProxyConfig, registry: Registry, pools: Pools, engines: Engines, entrance: Entrance
    ) -> None:
        self._config = config
        self._protocol = config.protocol
        self._entrance = entrance
        self._registry = registry
        self._loop = asyncio.get_running_loop()
        self._pools = pools
        self.failovers: Counter[tuple[str, str]] = Counter()
        """Attempts made once more, by the role that failed and how."""
        self._single = SingleEngine(engines)
        self._split = _protocol(config, registry, engines)

    def serve(self, request: ClientRequest, client: Client) -> Awaitable[None]:
        """Answers one client. Raises ApiError or ClientGoneError, at once or when awaited; what it leaves running ends
        by itself."""
        if self._protocol == "aggregated":
            return self._on_single_engine("aggregated", "aggregated", request, client)
        field = request.dialect.needs_single_engine(request.body)
        if field is not None:
            return self._on_single_engine(self._whole_role(), f"field:{field}", request, client)
        if self._protocol == "nixl-push" and request.dialect.name in UNSPLIT:
            return self._on_single_engine(self._whole_role(), f"api:{request.dialect.name}", request, client)
        empty = self._registry.empty_pools()
        if len(empty) == 1 and self._config.routing.on_empty_pool == "aggregate":
            role: EngineRole = "prefill" if empty[0] == "decode" else "decode"
            return self._on_single_engine(role, f"no-{empty[0]}", request, client)
        if empty:
            raise self._registry.no_worker(empty[0])
        decode = self._pools.pick("decode", request.ask)
        skip = self._pools.skips_prefill(request.ask, decode)
        if skip is not None:
            return self._on_single_engine("decode", skip, request, client, first=decode)
        return self._on_two_engines(request, client, first=decode)

    async def attempt_split(self, request: ClientRequest, client: Client, prefill: Worker, decode: Worker) -> None:
        """One attempt over two workers, or over one that does both, whatever the policies say."""
        if prefill is decode:
            await self._single.attempt(request, client, decode)
        else:
            await self._split.attempt(request, client, prefill, decode)

    def configure(self, config: ProxyConfig) -> None:
        """Another configuration from now on."""
        self._config = config

    async def drained(self) -> None:
        """Returns when nothing is running in the background."""
        await self._split.background.drained()

    def _on_two_engines(self, request: ClientRequest, client: Client, first: Worker) -> Awaitable[None]:
        request.decision = DISAGGREGATED

        def attempt(avoid: list[Worker]) -> Awaitable[None]:
            prefill = self._pools.pick("prefill", request.ask, avoid)
            decode = self._chosen("decode", first, request, avoid)
            request.prefill, request.decode = prefill.name, decode.name
            return self._split.attempt(request, client, prefill, decode)

        return self._admitted(request, client, self._registry.roles, attempt)

    def _on_single_engine(
        self, role: EngineRole, why: str, request: ClientRequest, client: Client, first: Worker | None = None
    ) -> Awaitable[None]:
        request.decision = why
        if not self._registry.ready(role):
            # No request waits in a queue for a pool that has no worker.
            raise self._registry.no_worker(role)

        def attempt(avoid: list[Worker]) -> Awaitable[None]:
            worker = self._chosen(role, first, request, avoid)
            request.decode = worker.name
            return self._single.attempt(request, client, worker)

        return self._admitted(request, client, (role,), attempt)

    def _chosen(self, role: EngineRole, first: Worker | None, request: ClientRequest, avoid: list[Worker]) -> Worker:
        """`first`, if it may still be used when the request has waited for its place."""
        if first is not None and request.attempts == 1 and first in self._registry.ready(role):
            return first
        return self._pools.pick(role, request.ask, avoid)

    async def _admitted(
        self, request: ClientRequest, client: Client, roles: tuple[EngineRole, ...], attempt: Attempt
    ) -> None:
        """With a place in each pool, until the end; with other workers after a failure."""
        priority, tokens = request.priority, request.ask.estimate
        tickets = self._entrance.enter_now(roles, priority, tokens)
        if len(tickets) < len(roles):
            tickets = await self._entrance.enter(tickets, roles, client, priority, tokens)
        request.stages.admitted = monotonic()
        if len(tickets) > 1:
            request.prefill_ticket = tickets[0]
        avoid: list[Worker] = []
        inquiry: Inquiry | None = None
        try:
            while True:
                request.attempts += 1
                try:
                    await attempt(avoid)
                except WorkerFailedError as failure:
                    if inquiry is None:
                        inquiry = Inquiry()
                    self._once_more(request, client, roles, failure, avoid, inquiry)
                else:
                    return
        finally:
            for ticket in tickets:
                ticket.release()

    def _once_more(
        self,
        request: ClientRequest,
        client: Client,
        roles: Collection[EngineRole],
        failure: WorkerFailedError,
        avoid: list[Worker],
        inquiry: Inquiry,
    ) -> None:
        """After a failed attempt: what the next one must know, or the error when there cannot be another."""
        worker, now = failure.worker, self._loop.time()
        role = worker.config.role
        if failure.fault == "absent" and not self._lacks_it(worker, now):
            raise failure.error from failure
        inquiry.add(worker.judgement, failure.fault, now)
        if failure.avoid:
            avoid.append(worker)
            request.tried += (worker.name,)
        answering_left = any(not other.judgement.doubtful for other in self._registry.ready(role, avoid))
        others = all(self._registry.ready(role, avoid) for role in roles)
        over = inquiry.is_over(answering_left=answering_left)
        if over or client.started or not failure.retry or not others:
            if inquiry.killed:
                log.error("%s: %s, as with another worker: not tried again", request.request_id, failure)
            raise failure.error from failure
        reason = f"http-{failure.error.status}" if failure.avoid else "stale"
        self.failovers[role, reason] += 1
        log.warning("%s: %s; once more", request.request_id, failure)
        client.on_answer = partial(_answered, inquiry)

    def _lacks_it(self, worker: Worker, now: float) -> bool:
        """Whether a 404 may be the worker's own fault. The first one in a row counts, and is its client's all the
        same."""
        siblings = self._registry.ready(worker.config.role, (worker,))
        if not any(sibling.judgement.answers(now) for sibling in siblings):
            return False
        unproven = worker.judgement.is_unproven(now)
        if not unproven:
            worker.judgement.failed("absent", now)
        return unproven

    def _whole_role(self) -> EngineRole:
        """Who computes what cannot be split: decode, whose answers are then its own."""
        if not self._registry.ready("decode") and self._config.routing.on_empty_pool == "aggregate":
            return "prefill"
        return "decode"


def _protocol(config: ProxyConfig, registry: Registry, engines: Engines) -> Split:
    match config.protocol:
        case "nixl":
            return NixlProtocol(registry, engines, config.kv_lease_seconds)
        case "nixl-push":
            return NixlPushProtocol(registry, engines, config.served_name)
        case "moriio":
            return MoriioProtocol(registry, engines, config.request_timeout_seconds)
        case "mooncake" | "aggregated":
            return MooncakeProtocol(registry, engines, config.served_name)


def _answered(inquiry: Inquiry) -> None:
    inquiry.answered(asyncio.get_running_loop().time())
