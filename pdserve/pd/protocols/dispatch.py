"""Bring a request to the workers that answer it: split or not, which of them, and what to try when one fails.

An attempt that fails before the first byte because of a worker is made again at once with other workers: a new transfer
and both legs anew. workers/judgement.py has the rule for how often, and for what that says of a worker.

A request that finds no engine of a role waits for one (relay.hold): before it has a place in a pool, and after an
attempt when its only engine has died.
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
from pdserve.pd.errors import ApiError, NoWorkerError
from pdserve.pd.protocols.background import Background
from pdserve.pd.protocols.mooncake import MooncakeProtocol
from pdserve.pd.protocols.moriio import MoriioProtocol
from pdserve.pd.protocols.nixl import NixlProtocol
from pdserve.pd.protocols.single_engine import SingleEngine
from pdserve.pd.relay.client import Client
from pdserve.pd.relay.entrance import Entrance
from pdserve.pd.relay.hold import Hold
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


class SplitProtocol(Protocol):
    """A P/D protocol."""

    background: Background

    async def attempt(self, request: ClientRequest, client: Client, prefill: Worker, decode: Worker) -> None: ...


class Dispatcher:
    """Chooses workers for a request, and tries again with others when an attempt fails."""

    def __init__(
        self, config: ProxyConfig, registry: Registry, pools: Pools, engines: Engines, entrance: Entrance, hold: Hold
    ) -> None:
        self._config = config
        self._protocol = config.protocol
        self._entrance, self._hold = entrance, hold
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
        empty = self._registry.empty_pools()
        if len(empty) == 1 and self._config.on_empty_pool == "aggregate":
            role: EngineRole = "prefill" if empty[0] == "decode" else "decode"
            return self._on_single_engine(role, f"no-{empty[0]}", request, client)
        if empty:
            return self._held(request, client, self._registry.roles)
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
            return self._held(request, client, (role,))

        def attempt(avoid: list[Worker]) -> Awaitable[None]:
            worker = self._chosen(role, first, request, avoid)
            request.decode = worker.name
            return self._single.attempt(request, client, worker)

        return self._admitted(request, client, (role,), attempt)

    async def _held(self, request: ClientRequest, client: Client, roles: tuple[EngineRole, ...]) -> None:
        """Waits for what it needs, holding no place in a pool, and is then served as one that has just come."""
        await self._hold.engines(client, roles)
        await self.serve(request, client)

    def _chosen(self, role: EngineRole, first: Worker | None, request: ClientRequest, avoid: list[Worker]) -> Worker:
        """`first`, if it may still be used when the request has waited for its place."""
        if first is not None and request.attempts == 1 and first in self._registry.ready(role):
            return first
        return self._pools.pick(role, request.ask, avoid)

    async def _admitted(
        self, request: ClientRequest, client: Client, roles: tuple[EngineRole, ...], attempt: Attempt
    ) -> None:
        """Make attempts with a place in each pool, until the end; with other workers after a failure."""
        priority, tokens = request.priority, request.ask.estimate
        tickets = self._entrance.enter_now(roles, priority, tokens)
        while len(tickets) < len(roles):
            try:
                tickets = await self._entrance.enter(tickets, roles, client, priority, tokens)
            except NoWorkerError:
                tickets = []
            if not tickets:
                # The last engine of a pool has gone while it waited for its place there.
                await self._hold.engines(client, roles)
                tickets = self._entrance.enter_now(roles, priority, tokens)
        request.stages.admitted = monotonic()
        if len(tickets) > 1:
            request.prefill_ticket = tickets[0]
        avoid: list[Worker] = []
        inquiry: Inquiry | None = None
        try:
            while True:
                request.attempts += 1
                lost: tuple[Worker, ApiError] | None = None
                try:
                    await attempt(avoid)
                except NoWorkerError:
                    # As above, between its place and the choice of an engine.
                    if avoid:
                        raise
                    request.attempts = 0
                except WorkerFailedError as failure:
                    if inquiry is None:
                        inquiry = Inquiry()
                    if self._once_more(request, client, roles, failure, avoid, inquiry):
                        lost = failure.worker, failure.error
                else:
                    return
                if lost is not None:
                    await self._next_life(request, client, roles, avoid, *lost)
                elif not request.attempts:
                    await self._hold.engines(client, roles)
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
    ) -> bool:
        """Note after a failed attempt what the next one must know, or raise the error when there cannot be another.
        True: there can be one once the engine that failed has come back, if it has died (`_next_life`)."""
        worker, now = failure.worker, self._loop.time()
        role = worker.config.role
        if failure.fault == "absent" and not self._lacks_it(worker, now):
            raise failure.error from failure
        inquiry.add(worker.judgement, failure.fault, now)
        if failure.avoid:
            avoid.append(worker)
            request.tried += (worker.name,)
        answering_left = any(not other.judgement.doubtful for other in self._registry.ready(role, avoid))
        if inquiry.is_over(answering_left=answering_left) or client.started or not failure.retry:
            if inquiry.killed:
                log.error("%s: %s, as with another worker: not tried again", request.request_id, failure)
            raise failure.error from failure
        client.on_answer = partial(_answered, inquiry)
        alone = not all(self._registry.ready(role, avoid) for role in roles)
        if not alone:
            reason = f"http-{failure.error.status}" if failure.avoid else "stale"
            self.failovers[role, reason] += 1
            log.warning("%s: %s; once more", request.request_id, failure)
        return alone

    async def _next_life(
        self,
        request: ClientRequest,
        client: Client,
        roles: tuple[EngineRole, ...],
        avoid: list[Worker],
        lost: Worker,
        error: ApiError,
    ) -> None:
        """Waits for an engine that may be used again, or another one. Those that come back need not be avoided."""
        lives = {worker: worker.life for worker in avoid}
        await self._hold.next_life(client, roles, lives, lost, error)
        avoid[:] = [worker for worker in avoid if worker.life == lives[worker]]
        self.failovers[lost.config.role, "died"] += 1
        log.warning("%s: %s; once more, as an engine is back", request.request_id, error)

    def _lacks_it(self, worker: Worker, now: float) -> bool:
        """Return whether a 404 may be the worker's own fault. The first one in a row counts, and is its client's all
        the same."""
        siblings = self._registry.ready(worker.config.role, (worker,))
        if not any(sibling.judgement.answers(now) for sibling in siblings):
            return False
        unproven = worker.judgement.is_unproven(now)
        if not unproven:
            worker.judgement.failed("absent", now)
        return unproven

    def _whole_role(self) -> EngineRole:
        """Return the role that computes what cannot be split: decode, whose answers are then its own."""
        if not self._registry.ready("decode") and self._config.on_empty_pool == "aggregate":
            return "prefill"
        return "decode"


def _protocol(config: ProxyConfig, registry: Registry, engines: Engines) -> SplitProtocol:
    match config.protocol:
        case "nixl":
            return NixlProtocol(registry, engines, config.kv_lease_seconds)
        case "moriio":
            return MoriioProtocol(registry, engines, config.request_timeout_seconds)
        case "mooncake" | "aggregated":
            return MooncakeProtocol(registry, engines, config.served_name)


def _answered(inquiry: Inquiry) -> None:
    inquiry.answered(asyncio.get_running_loop().time())
