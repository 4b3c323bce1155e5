"""The workers, what is known of each, and which of them may be used.

A worker is used only while the supervisor calls it ready and its health checks pass; and what judgement.py says of it.
Every attempt that uses it is notified of its death at once.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from time import monotonic
from typing import Any, Final, Literal, get_args

from pdserve.pd.config.proxy import ProxyConfig, WorkerConfig
from pdserve.pd.errors import NoWorkerError
from pdserve.pd.http.upstream import Pool
from pdserve.pd.processes.shared_numbers import LOOK_SECONDS
from pdserve.pd.workers.judgement import Judgement
from pdserve.pd.workers.load import LoadBoard, WorkerLoad
from pdserve.pd.workers.wakeable import Wakeable
from pdserve.roles import EngineRole

Poke = Callable[[], None]
_NOBODY: Final = 0.0


class Slots:
    """A count with a queue. A leg that waits is poked when it may have its turn: at once when this process gives a
    place back, within LOOK_SECONDS when another one does."""

    __slots__ = ("_load", "_look_again", "_most", "_waiting")

    def __init__(self, load: WorkerLoad, transfers: int) -> None:
        """`load`: where the places are counted. `transfers`: sender tasks of the prefill."""
        self._load = load
        self._most = max(1, transfers - 1)
        self._waiting: deque[tuple[float, Poke]] = deque()
        """With the time.monotonic() of their arrival."""
        self._look_again: asyncio.TimerHandle | None = None

    @property
    def free(self) -> int:
        """Places that are free."""
        return self._most - self._load.transfers

    def take(self) -> bool:
        """Take a place, unless somebody waits for it; else `enqueue`."""
        load = self._load
        if self._waiting or (load.shared and load.others_wait(monotonic())):
            return False
        return load.begin_transfer(self._most)

    def give(self) -> None:
        self._load.end_transfer()
        self._poke_first()

    def enqueue(self, poke: Poke) -> None:
        self._waiting.append((monotonic(), poke))
        if self._load.shared and self._look_again is None:
            self._look()

    def is_next(self, poke: Poke) -> bool:
        """Its turn has come: `take_turn`."""
        if not self._waiting or self.free <= 0:
            return False
        since, first = self._waiting[0]
        return first is poke and not self._load.others_wait(since)

    def take_turn(self) -> bool:
        """The first in the queue takes its place; False: another process was quicker."""
        return self._load.begin_transfer(self._most)

    def dequeue(self, poke: Poke) -> None:
        """Leaves the queue, with a place or without; the next one looks for itself."""
        for place, (_, waiting) in enumerate(self._waiting):
            if waiting is poke:
                del self._waiting[place]
                break
        self._show_first()
        self._poke_first()

    def _poke_first(self) -> None:
        if self._waiting and self.free > 0:
            self._waiting[0][1]()

    def _show_first(self) -> None:
        self._load.show_waiting(self._waiting[0][0] if self._waiting else _NOBODY)

    def _look(self) -> None:
        """While a leg waits, at the places that other processes have given back."""
        self._look_again = None
        self._show_first()
        if self._waiting:
            self._look_again = asyncio.get_running_loop().call_later(LOOK_SECONDS, self._look)
            self._poke_first()


WorkerState = Literal["starting", "ready", "draining", "dead"]
STATES: Final[tuple[WorkerState, ...]] = get_args(WorkerState)
RETRY_AFTER_SECONDS: Final = 5


class Worker:
    """One engine. Must be made inside a running event loop. Satisfies routing.policy.RoutingCandidate."""

    __slots__ = (
        "config",
        "deaths",
        "healthy",
        "heard",
        "judgement",
        "key_of_client",
        "kv_usage",
        "leaving",
        "life",
        "load",
        "name",
        "outcomes",
        "pool",
        "served",
        "slots",
        "state",
        "watches",
    )

    def __init__(
        self,
        config: WorkerConfig,
        proxy: ProxyConfig,
        board: LoadBoard,
        tls: ssl.SSLContext | None,
        doubtful: set[Judgement],
    ) -> None:
        self.config = config
        self.name = config.name
        self.state: WorkerState = "starting"
        self.healthy = True
        """The result of our own checks."""
        self.heard = 0.0
        """Loop time of its last answer to a request, whatever that was."""
        self.served = 0
        """Legs ever sent to it by this process."""
        self.life = 0
        """Grows each time that it comes up: what was learnt of an earlier life is void."""
        self.deaths = 0
        self.kv_usage = 0.0
        self.leaving = False
        """The launcher has it no more: it is gone once its last request is over."""
        self.key_of_client = proxy.auth.client_authorization == "forward"
        """Requests carry the client's own key: a 401 is the client's."""
        self.outcomes: dict[str, int] = {}
        """How legs to it have ended: ok, refused (4xx), failed, left."""
        self.watches: set[Wakeable] = set()
        """The attempts that end when it dies."""
        self.pool = Pool(config.url, connect_timeout=proxy.connect_timeout_seconds, tls=tls)
        self.judgement = Judgement(proxy.breaker.failures, proxy.breaker.open_seconds, doubtful)
        # Last: a worker that cannot be made takes no row, as the other processes never hear of it.
        self.load = board.worker(config.name)
        self.slots = Slots(self.load, proxy.transfer_slots)

    @property
    def requests(self) -> int:
        return self.load.requests

    @property
    def prompt_tokens(self) -> int:
        return self.load.prompt_tokens

    def opened(self) -> None:
        """A leg to it begins."""
        self.load.add_request(1)
        self.served += 1

    def closed(self) -> None:
        """Count a leg that has ended."""
        self.load.add_request(-1)

    def died(self) -> None:
        self.deaths += 1
        for watch in list(self.watches):
            watch.wake()

    @property
    def fit(self) -> bool:
        """It may be used, but for what its judgement says."""
        return self.state == "ready" and self.healthy

    def unfit(self) -> str:
        """Return why the worker may not be used; empty: it may."""
        if self.state != "ready":
            return self.state
        if not self.healthy:
            return "failing its health checks"
        return "with an open breaker" if self.judgement.shut else ""

    def describe(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "role": self.config.role,
            "state": self.state,
            "healthy": self.healthy,
            "breaker": self.judgement.state,
            "in_flight": self.requests,
            "prompt_tokens": self.prompt_tokens,
            "kv_usage": round(self.kv_usage, 4),
            "served": self.served,
        }


class Registry:
    """All workers of the deployment."""

    def __init__(self, config: ProxyConfig, board: LoadBoard, tls: ssl.SSLContext | None = None) -> None:
        self._config, self._board, self._tls = config, board, tls
        self._on_ready: list[Callable[[Worker], None]] = []
        self._on_lost: list[Callable[[Worker], None]] = []
        self._on_change: list[Callable[[], None]] = []
        self._ready: dict[EngineRole, list[Worker]] = {}
        self._empty_pools: list[EngineRole] | None = None
        """Both without the judgements; worked out when they are asked for."""
        self._doubtful: set[Judgement] = set()
        self.workers: dict[str, Worker] = {}
        self.roles: tuple[EngineRole, ...] = (
            ("aggregated",) if config.protocol == "aggregated" else ("prefill", "decode")
        )
        self._launchers: set[str] = set()
        """Names of those that are the launcher's to set, and no admin's."""
        self.set_workers(config.workers)

    def on_ready(self, listener: Callable[[Worker], None]) -> None:
        """Called with each worker that becomes ready."""
        self._on_ready.append(listener)

    def on_lost(self, listener: Callable[[Worker], None]) -> None:
        """Called with each worker whose caches are gone: it died, was removed or starts anew."""
        self._on_lost.append(listener)

    def on_change(self, listener: Callable[[], None]) -> None:
        """Called whenever another set of workers may be used."""
        self._on_change.append(listener)

    def changed(self) -> None:
        """Another set of workers may be used."""
        self._forget_ready()
        for listener in self._on_change:
            listener()

    def add(self, config: WorkerConfig) -> Worker:
        """A new worker, starting. One that has its name makes place for it: what runs there goes on."""
        worker = Worker(config, self._config, self._board, self._tls, self._doubtful)
        former = self.workers.get(config.name)
        if former is not None:
            former.state = "draining"
            former.judgement.forgotten()
            former.pool.retire()
            for listener in self._on_lost:
                listener(former)
        self.workers[config.name] = worker
        self.changed()
        return worker

    def set_workers(self, configs: Sequence[WorkerConfig]) -> list[Worker]:
        """Makes these the launcher's workers, and returns those that are new, which are starting. One that is not among
        them gets no request any more, and is removed once its last one is over (`remove_left`)."""
        names = {config.name for config in configs}
        for name in self._launchers - names:
            if (gone := self.workers.get(name)) is not None:
                gone.leaving = True
                if gone.state != "dead":
                    self.set_state(name, "draining")
        self._launchers = names
        new = []
        for config in configs:
            known = self.workers.get(config.name)
            if known is None or known.config != config:
                new.append(self.add(config))
            else:
                known.leaving = False
        return new

    def remove_left(self) -> None:
        """Remove workers that are leaving, and in which no process of this proxy has a request any more."""
        for worker in list(self.workers.values()):
            if worker.leaving and not worker.requests:
                self.remove(worker.name)

    def remove(self, name: str) -> None:
        """Attempts that use it end as if it had died. KeyError: no such worker."""
        self.set_state(name, "dead")
        worker = self.workers.pop(name)
        worker.pool.close()
        worker.judgement.forgotten()
        self._board.remove(name)
        self.changed()

    def set_state(self, name: str, state: WorkerState, *, alive: bool = True) -> None:
        """`alive`: it has been seen to answer; else our own checks must first. KeyError: no such worker."""
        worker = self.workers[name]
        before, worker.state = worker.state, state
        if state == "dead" and before != "dead":
            worker.died()
        if before != state and (state == "dead" or (state == "starting" and before != "dead")):
            for listener in self._on_lost:
                listener(worker)
        if state == "ready" and before in ("starting", "dead"):
            worker.life += 1
            worker.kv_usage = 0.0
            worker.healthy = alive
            worker.judgement.renewed()
        self.changed()
        if state == "ready" and before != "ready":
            for listener in self._on_ready:
                listener(worker)

    def set_health(self, worker: Worker, healthy: bool) -> None:
        """The result of our own checks. Its engine may be another one when it comes back."""
        back = healthy and not worker.healthy
        worker.healthy = healthy
        self.changed()
        if back:
            worker.life += 1
            worker.judgement.renewed()
            if worker.state == "ready":
                for listener in self._on_ready:
                    listener(worker)

    def set_all_ready(self) -> None:
        for name in self.workers:
            self.set_state(name, "ready")

    def ready(self, role: EngineRole, avoid: Collection[Worker] = ()) -> Sequence[Worker]:
        """Return the workers that may be used now: the doubtful ones only where there is no other."""
        workers = self._ready.get(role)
        if workers is None:
            workers = self._ready[role] = [
                worker for worker in self.workers.values() if worker.fit and worker.config.role == role
            ]
        if not avoid and not self._doubtful:
            return workers
        usable = [worker for worker in workers if worker not in avoid and not worker.judgement.shut]
        return [worker for worker in usable if not worker.judgement.doubtful] or usable

    def no_worker(self, role: EngineRole) -> NoWorkerError:
        """Return the error for a client while no worker of this role may be used: 503, with how its workers are."""
        unfit = Counter(worker.unfit() for worker in self.workers.values() if worker.config.role == role)
        # Usable and still here: it is one that this request has just tried.
        reasons = ", ".join(f"{count} {why or 'just tried'}" for why, count in sorted(unfit.items()))
        return NoWorkerError(
            503, f"No {role} worker is ready ({reasons or 'there is none'}).", retry_after=RETRY_AFTER_SECONDS
        )

    def empty_pools(self) -> list[EngineRole]:
        """Roles without a worker that may be used."""
        if self._doubtful:
            return [role for role in self.roles if not self.ready(role)]
        if self._empty_pools is None:
            self._empty_pools = [role for role in self.roles if not self.ready(role)]
        return self._empty_pools

    def _forget_ready(self) -> None:
        self._ready.clear()
        self._empty_pools = None

    def close(self) -> None:
        for worker in self.workers.values():
            worker.pool.close()
