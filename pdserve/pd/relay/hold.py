"""Requests that find no engine of a role wait until there is one, in the order of their arrival.

A request waits here before it has a place in any pool, or when its only engine has died before a byte of its answer.
Its bytes count in the budget of its process meanwhile (http.incoming.Budget), so that what waits is bounded by that: a
request beyond it is refused before it comes here.

What an engine that comes or goes reports wakes those that wait. No event tells that an engine that could not
be reached has answered a canary: that is looked at every now and then, and only while nothing else keeps one out.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from time import monotonic
from typing import Final

from pdserve.pd.config.proxy import ProxyConfig
from pdserve.pd.errors import ApiError
from pdserve.pd.relay.client import Client
from pdserve.pd.relay.waiting import EARLY_SECONDS, Watch
from pdserve.pd.workers.registry import Registry, Worker
from pdserve.roles import EngineRole

Lives = Mapping[Worker, int]
"""Engines that a request has failed with -> the life that each had then. Another life of one may answer it."""

DEATH_SECONDS: Final = 1.0
"""How long after a request has failed the news of its engine's death may come: connections are lost first, and a server
whose EngineCore has died answers 500. One that has not died by then lives."""
_LOOK_SECONDS: Final = 0.1
_NO_LIVES: Final[Lives] = {}


class HeldRequest:
    """Holds a request that waits: which engines it needs, which of them it does not want, and since when."""

    __slots__ = ("left", "roles", "since", "watch")

    def __init__(self, watch: Watch, roles: tuple[EngineRole, ...], left: Lives) -> None:
        self.watch = watch
        self.roles = roles
        self.left = left
        self.since = monotonic()


class Hold:
    """The requests of one proxy process that wait for an engine."""

    def __init__(self, config: ProxyConfig, registry: Registry) -> None:
        self._registry = registry
        self._loop = asyncio.get_running_loop()
        self._held: dict[HeldRequest, None] = {}
        self._look_again: asyncio.TimerHandle | None = None
        self._stopped = asyncio.Event()
        self.ended: Counter[tuple[str, str]] = Counter()
        """Waits that are over, by the role that was lacking at their beginning and how they ended: answered (an engine
        is back), late, left (the client), stopped (the proxy)."""
        self.configure(config)
        registry.on_change(self._look)

    def configure(self, config: ProxyConfig) -> None:
        """Take another configuration, for requests that come from now on."""
        self._waits, self._seconds = config.on_empty_pool == "wait", config.hold_seconds

    def stop(self) -> None:
        """Let nobody wait any more: the proxy ends."""
        self._stopped.set()
        for held in self._held:
            held.watch.wake()

    def waiting(self) -> Iterator[tuple[EngineRole, int, float]]:
        """Yield for each role the requests that wait for an engine of it, and the seconds that the first has waited."""
        now = monotonic()
        ages: dict[EngineRole, list[float]] = {role: [] for role in self._registry.roles}
        for held in self._held:
            for role in held.roles:
                if not self._available(role, held.left):
                    ages[role].append(now - held.since)
        for role, waiting in ages.items():
            yield role, len(waiting), max(waiting, default=0.0)

    async def engines(self, client: Client, roles: tuple[EngineRole, ...], left: Lives = _NO_LIVES) -> None:
        """Wait until there is an engine of each role. `left`: those that the request is not to use again in these
        lives. Raises NoWorkerError when there is none in time, or nobody waits here; ClientGoneError or ApiError when
        something else has ended the request."""
        lacking = self._lacking(roles, left)
        if lacking is None:
            return
        if not self._waits or self._stopped.is_set():
            raise self._registry.no_worker(lacking)
        how = "left"
        try:
            await self._until(client, roles, left, self._seconds, self._stopped.is_set)
            still = self._lacking(roles, left)
            how = "answered" if still is None else "stopped" if self._stopped.is_set() else "late"
        finally:
            self.ended[lacking, how] += 1
        if still is not None:
            raise self._registry.no_worker(still)

    async def next_life(
        self, client: Client, roles: tuple[EngineRole, ...], left: Lives, lost: Worker, error: ApiError
    ) -> None:
        """Wait as `engines` does, after the request has failed at `lost`, its last engine of a role. `error`: raised
        when `lost` has not died, and when nobody waits here."""
        if not self._waits or self._stopped.is_set():
            raise error
        life = lost.life

        def died() -> bool:
            return not lost.fit or lost.life != life

        await self._until(client, roles, left, DEATH_SECONDS, lambda: died() or self._stopped.is_set())
        if not died() and self._lacking(roles, left) is not None:
            raise error
        await self.engines(client, roles, left)

    def _available(self, role: EngineRole, left: Lives) -> bool:
        ready = self._registry.ready(role)
        return any(left.get(worker) != worker.life for worker in ready) if left else bool(ready)

    def _lacking(self, roles: tuple[EngineRole, ...], left: Lives) -> EngineRole | None:
        for role in roles:
            if not self._available(role, left):
                return role
        return None

    async def _until(
        self, client: Client, roles: tuple[EngineRole, ...], left: Lives, seconds: float, over: Callable[[], bool]
    ) -> None:
        """Wait until there is an engine of each role, the time is up, or `over`."""
        watch = Watch(client, ())
        held = HeldRequest(watch, roles, left)
        end = self._loop.time() + seconds
        timer = self._loop.call_at(end + EARLY_SECONDS, watch.wake)
        self._held[held] = None
        self._look()
        try:
            await watch.until(lambda: self._lacking(roles, left) is None or self._loop.time() >= end or over())
        finally:
            del self._held[held]
            timer.cancel()
            watch.end()

    def _look(self) -> None:
        """Wake the requests that may go on, the oldest first: each looks for itself whether one before it took the
        chance."""
        lacking: set[EngineRole] = set()
        for held in self._held:
            # With thousands of them, what holds for one holds for all that have not tried an engine.
            if held.left or lacking.isdisjoint(held.roles):
                role = self._lacking(held.roles, held.left)
                if role is None or held.left:
                    held.watch.poke()
                if role is not None and not held.left:
                    lacking.add(role)
        if self._held and self._look_again is None and any(worker.fit for worker in self._registry.workers.values()):
            self._look_again = self._loop.call_later(_LOOK_SECONDS, self._look_later)

    def _look_later(self) -> None:
        self._look_again = None
        self._look()
