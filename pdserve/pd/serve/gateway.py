"""The state of one proxy process: what its requests pass through, and what changes while it serves."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from hashlib import sha256
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.types import ASGIApp

from pdserve.errors import PdserveError
from pdserve.pd.config.proxy import ProxyConfig, WorkerConfig
from pdserve.pd.errors import ApiError, bad_request
from pdserve.pd.file_reads import READ_SECONDS, FileReads
from pdserve.pd.http.cors import Cors
from pdserve.pd.http.front import Request
from pdserve.pd.http.reply import HttpReply
from pdserve.pd.limits.admission import CELLS_PER_PROCESS
from pdserve.pd.limits.allowed_hosts import AllowedHosts
from pdserve.pd.limits.api_keys import ApiKey, Keys
from pdserve.pd.limits.keys import OWN_NAME, KeyFile
from pdserve.pd.limits.quotas import Quotas, cells_needed
from pdserve.pd.processes.shared_numbers import Numbers
from pdserve.pd.processes.shared_pages import Pages
from pdserve.pd.protocols.dispatch import Dispatcher
from pdserve.pd.relay.entrance import Entrance
from pdserve.pd.relay.hold import Hold
from pdserve.pd.relay.worker_trials import WorkerTrials
from pdserve.pd.serve.accounting import Accounting
from pdserve.pd.serve.answering import Answering
from pdserve.pd.serve.client_tls import ClientTls
from pdserve.pd.serve.intake import Intake
from pdserve.pd.serve.pair_canary import PairCanary, Prewarm
from pdserve.pd.serve.request_parser import RequestParser
from pdserve.pd.serve.stored_responses import StoredResponses
from pdserve.pd.telemetry.metrics import Metrics
from pdserve.pd.telemetry.metrics_page import Labels
from pdserve.pd.telemetry.request_log import RequestLog
from pdserve.pd.telemetry.spans import open_spans
from pdserve.pd.workers.engines import Engines, upstream_tls
from pdserve.pd.workers.health_checks import HealthChecks
from pdserve.pd.workers.kv_feeds import KvFeeds
from pdserve.pd.workers.load import LoadBoard
from pdserve.pd.workers.models import Catalog, Models
from pdserve.pd.workers.pools import Pools
from pdserve.pd.workers.registry import RETRY_AFTER_SECONDS, Registry, Worker, WorkerState
from pdserve.roles import EngineRole
from pdserve.time_limit import time_limit

if TYPE_CHECKING:
    from pdserve.pd.serve.admin import AdminServer

log = logging.getLogger("pdserve.proxy")

T = TypeVar("T")
_TICK_SECONDS = 0.5
_LONGEST_CANARY = 65_536
_TRIAL_TOKENS = 2


class Gateway:
    """The state of one proxy process: the Handler of its front, and the ServedGateway of its server. It must be made
    inside its loop."""

    def __init__(
        self,
        config: ProxyConfig,
        key: str | None,
        numbers: Numbers,
        app: ASGIApp,
        read_again: Callable[[], ProxyConfig] | None = None,
        *,
        pages: Pages | None = None,
        notify: Callable[[dict[str, Any]], None] | None = None,
        succeeds: bool = False,
    ) -> None:
        """Make all that serves, and start nothing yet. `read_again`: the configuration as it is now, for `reload`.
        `pages`, `notify`: figures of the other processes of this proxy, and what sends to all of them; None: there is
        only this one. `succeeds`: another process has the admin's address until it sends {"admin": "free"}. Raises
        RecipeError or StartError when the files or addresses that the configuration names cannot be used."""
        self.config = config
        self._numbers = numbers
        self._read_again, self._pages, self._notify = read_again, pages, notify
        self.draining = False
        self.keys = KeyFile(Path(config.auth.keys_file), key) if config.auth.keys_file else None
        self.registry = Registry(config, LoadBoard(numbers), upstream_tls(config.upstream_tls))
        self.engines = Engines(key, config.auth.client_authorization, config.forward_headers)
        self.pools = Pools(config, self.registry)
        self.metrics = Metrics()
        self.log = RequestLog(write_stderr, config.log)
        self.quotas = Quotas(numbers) if self.keys is not None else None
        self._spans = open_spans(config.otel, config.served_name)
        self._loop = asyncio.get_running_loop()
        self._entrance = Entrance(config, self.registry, numbers)
        self._hold = Hold(config, self.registry)
        self._dispatcher = Dispatcher(config, self.registry, self.pools, self.engines, self._entrance, self._hold)
        self._health = HealthChecks(self.registry, config.health, self.engines.key_header, self._entrance.refresh)
        self._parser = RequestParser(config, self.engines)
        self.models = Models(self.registry, self.engines, config.served_name)
        self._catalog = Catalog(self.registry, self.engines)
        self._stored = StoredResponses(config, self.registry, self.engines, self._entrance)
        served = self._catalog.served
        self.cors = None if config.cors is None else Cors(config.cors)
        self._intake = Intake(
            AllowedHosts.of(config),
            self.keys,
            self.quotas,
            served,
            self._parser,
            self.metrics,
            self.cors,
        )
        self.tls = None if config.tls is None else ClientTls(config.tls)
        self._feeds = KvFeeds(self.registry, self.pools, self.engines)
        self._answering = Answering(
            app,
            self._intake,
            self._parser,
            self._stored,
            self._dispatcher.serve,
            Accounting(self.metrics, self.log, self._spans),
            self.pools,
            self._feeds,
            self._entrance,
            self.cors,
            served_name=config.served_name,
            seconds=config.request_timeout_seconds,
        )
        self._canary = PairCanary(self.engines, self._dispatcher.attempt_split, config.served_name)
        self._trials = WorkerTrials(self.registry, self._try, self._health, config.health.interval_seconds)
        self._owner = None if key is None else Keys([ApiKey(OWN_NAME, sha256(key.encode()).digest())])
        self._prewarm = (
            Prewarm(self.registry, self._canary)
            if config.prewarm and config.protocol != "aggregated" and numbers.process == 0
            else None
        )
        self.not_restarted = ""
        """Why the last rolling restart was none."""
        self.retiring = 0
        """Processes of this proxy that end what they have begun, and whose requests are counted nowhere else."""
        self._files = {what: FileReads() for what in ("keys", "certificate", "policies")}
        """Apart, so that one that hangs holds up no other."""
        self._reloads: set[asyncio.Task[dict[str, str]]] = set()
        self._key_look: asyncio.Task[None] | None = None
        self._keys_hang = False
        self._has_admin = config.admin is not None and numbers.process == 0
        self._admin = None if succeeds else self._new_admin()
        self.metrics.read_gauges_from(self._gauges)
        self.metrics.read_counters_from(self._counters)

    @staticmethod
    def numbers(config: ProxyConfig) -> int:
        """Return how many shared numbers a gateway takes."""
        processes = config.processes
        quotas = cells_needed(processes) if config.auth.keys_file else 0
        return LoadBoard.cells(processes) + quotas + 2 * CELLS_PER_PROCESS * processes

    # --- Handler

    def refuse(self, request: Request) -> ApiError | None:
        return self._intake.refuse(request)

    def handle(self, request: Request, reply: HttpReply) -> None:
        self._answering.handle(request, reply)

    def failed(self, request: Request | None, reply: HttpReply, error: ApiError) -> None:
        self._answering.failed(request, reply, error)

    # --- ServedGateway

    def begin(self) -> None:
        for worker in self.registry.workers.values():
            self._health.watch(worker)
        self._ticker = self._loop.create_task(self._tick())
        if self._admin is not None:
            self._admin.start()

    def leave(self) -> None:
        self._pages = None
        try:
            self._numbers.detach()
        except OSError as error:
            log.error("figures that the processes share may be wrong until all of them are restarted: %s", error)

    async def retire(self) -> None:
        admin, self._admin = self._admin, None
        if admin is not None:
            await admin.stop()
        if self._notify is not None and self._has_admin:
            self._notify({"admin": "free"})

    def open_admin(self) -> None:
        """Open the admin: its address is free."""
        if self._admin is None and (admin := self._new_admin()) is not None:
            self._admin = admin
            admin.start()
            log.info("the admin of this process is open")

    def stop_holding(self) -> None:
        self._hold.stop()

    def drain(self) -> None:
        self.draining = True

    def busy(self) -> bool:
        return self._answering.busy

    def cut(self) -> None:
        limit = ApiError(503, "The proxy is shutting down.", retry_after=RETRY_AFTER_SECONDS)
        for client in list(self._answering.clients):
            client.interrupt(limit)

    def begin_reload(self) -> None:
        task = self._loop.create_task(self.reload())
        self._reloads.add(task)
        task.add_done_callback(self._reloads.discard)

    async def reload(self) -> dict[str, str]:
        """Reads the API keys, the certificate, the policies and the limits again, without dropping a stream. What
        cannot be read stays as it was; the answer has the reason."""
        results = {}
        if self.keys is not None:
            results["keys"] = await self._read("keys", self.keys.reload)
        if self.tls is not None:
            results["certificate"] = await self._read("certificate", self.tls.reload)
        if self._read_again is not None:
            fresh = await self._read("policies", partial(_configuration, self._read_again))
            if isinstance(fresh, str):
                results["policies"] = fresh
            else:
                self._reconfigure(fresh)
                results["policies"] = "ok"
                if self._notify is not None:
                    # For who replaces this process when it dies.
                    self._notify({"runs_with": self.config.model_dump_json()})
        return results

    async def _read(self, what: str, read: Callable[[], T]) -> T | str:
        """Return what `read` gives, or why it has given nothing in time."""
        try:
            return await self._files[what].run(read)
        except TimeoutError:
            why = f"not read within {READ_SECONDS:g} s: the file system does not answer"
            log.error("the %s stay as they were: %s", what, why)
            return f"not usable: {why}"

    async def _look_at_keys(self, keys: KeyFile) -> None:
        try:
            await self._files["keys"].run(keys.reload_if_changed)
        except TimeoutError:
            if not self._keys_hang:
                log.error(
                    "the API keys stay as they were: %s is not read within %g s: the file system does not answer",
                    keys.path,
                    READ_SECONDS,
                )
            self._keys_hang = True
        else:
            self._keys_hang = False

    def _new_admin(self) -> AdminServer | None:
        if self.config.admin is None or not self._has_admin:
            return None
        # It takes 3 MB, which a proxy without an admin does without.
        from pdserve.pd.serve.admin import AdminServer, AdminWorkers

        workers = AdminWorkers(self, self._notify or _no_other_process)
        return AdminServer(self.config.admin, workers, self._reload_all, partial(self.page, keys=True))

    async def _reload_all(self) -> dict[str, str]:
        if self._notify is not None:
            self._notify({"reload": True})
        return await self.reload()

    def add_worker(self, config: WorkerConfig) -> None:
        """Add a worker for an admin: it is used once it has passed its first check. Raises ValueError when there are
        too many."""
        if (known := self.registry.workers.get(config.name)) is not None and known.config == config:
            return
        added = self.registry.add(config)
        added.healthy = False
        self.registry.set_state(config.name, "ready", alive=False)
        self._health.watch(added)

    def set_workers(self, configs: Sequence[WorkerConfig], states: Mapping[str, WorkerState]) -> None:
        """Take the launcher's workers: all that there are from now on, and what each is. Raises ValueError when one of
        them cannot be used, and all stays as it was."""
        for config in configs:
            if config.role not in self.registry.roles:
                raise ValueError(f"this deployment has no {config.role} workers")
            if lack := self.config.lack_of(config):
                raise ValueError(lack)
        for worker in self.registry.set_workers(configs):
            self._health.watch(worker)
        for name, state in states.items():
            if name in self.registry.workers:
                self.registry.set_state(name, state)

    def page(self, *, keys: bool = False) -> bytes:
        """Return the page that Prometheus reads, over all processes of this proxy. `keys`: also what names API keys,
        for the admin."""
        return self.metrics.page(() if self._pages is None else self._pages.others(), keys=keys)

    def _reconfigure(self, fresh: ProxyConfig) -> None:
        if fresh.routing != self.config.routing:
            self.pools.configure(fresh)
            self._feeds.restart()
        self._entrance.configure(fresh.admission)
        # Addresses and workers of a running proxy are not the file's to change.
        again = {name: getattr(fresh, name) for name in ("routing", "admission", "on_empty_pool", "hold_seconds")}
        self.config = self.config.model_copy(update=again)
        self._dispatcher.configure(self.config)
        self._hold.configure(self.config)
        self._stored.configure(self.config)
        self._parser.configure(self.config)

    async def finish(self, seconds: float) -> None:
        self._health.stop()
        self._ticker.cancel()
        self._trials.stop()
        if self._prewarm is not None:
            self._prewarm.stop()
        if self._admin is not None:
            await self._admin.stop()
        await self._feeds.close()
        with contextlib.suppress(TimeoutError):
            async with time_limit(seconds):
                await self._dispatcher.drained()
        self.registry.close()
        self.log.flush()
        self._spans.close()

    # --- for the application

    def readiness(self) -> tuple[bool, dict[str, Any]]:
        empty = self.registry.empty_pools()
        aggregate = self.config.on_empty_pool == "aggregate" and len(empty) < len(self.registry.roles)
        ready = (not empty or aggregate) and not self.draining
        return ready, {
            "ready": ready,
            "draining": self.draining,
            "empty_pools": empty,
            "held": {
                role: {"requests": count, "oldest_seconds": round(age, 1)} for role, count, age in self._hold.waiting()
            },
            "workers": [worker.describe() for worker in self.registry.workers.values()],
        }

    async def send_canary(self, authorization: str, pair: Mapping[str, str]) -> None:
        """Send a canary through the pair that whoever has the deployment's engine key names, with `tokens` and
        `seconds`. Raises ApiError when it was not answered, or is not possible."""
        if self._owner is None:
            raise ApiError(401, "This proxy has no engine key, and so nobody may ask for a canary.")
        self._owner.identify(authorization.encode("latin-1"))
        roles: tuple[EngineRole, ...] = ("prefill", "decode")
        prefill, decode = (self.registry.workers.get(pair.get(role, "")) for role in roles)
        if prefill is None or decode is None or (prefill.config.role, decode.config.role) != roles:
            raise ApiError(404, "There is no such pair of workers.")
        try:
            tokens, seconds = int(pair["tokens"]), float(pair["seconds"])
        except (KeyError, ValueError) as error:
            raise bad_request("A canary has a number of tokens and of seconds.") from error
        if not (0 < tokens <= _LONGEST_CANARY and 0 < seconds <= self.config.request_timeout_seconds):
            raise bad_request("A canary has some tokens, and no more seconds than a request.")
        await self._canary.send(prefill, decode, tokens=tokens, seconds=seconds)

    def load(self) -> int:
        """Return the requests that hold a place at an engine or wait for one, over all processes for those that hold
        one."""
        return max(gate.requests + gate.waiting for gate in self._entrance.gates.values())

    # --- inside

    async def _try(self, prefill: Worker, decode: Worker, seconds: float) -> None:
        await self._canary.send(prefill, decode, tokens=_TRIAL_TOKENS, seconds=seconds)

    def _gauges(self) -> Iterator[tuple[str, Labels, float]]:
        for worker in self.registry.workers.values():
            labels = (worker.config.role, worker.name)
            yield "in_flight", labels, worker.requests
            yield "prompt_tokens_in_flight", labels, worker.prompt_tokens
            yield "kv_usage_ratio", labels, worker.kv_usage
            yield "worker_ready", labels, float(worker.state == "ready" and worker.healthy)
            yield "breaker_open", labels, float(worker.judgement.state == "open")
        for role, gate in self._entrance.gates.items():
            yield "queue_depth", (role,), gate.waiting
            yield "pool_requests", (role,), gate.requests
        for role, count, age in self._hold.waiting():
            yield "held_requests", (role,), count
            yield "held_oldest_seconds", (role,), age
        if self.quotas is not None and self.keys is not None:
            for name in self.keys.current.names:
                yield "key_requests", (name,), self.quotas.in_flight(name)
        yield "draining", (), float(self.draining)

    def _counters(self) -> Iterator[tuple[str, Labels, int]]:
        for decision, count in self.pools.decisions.items():
            yield "routing_decisions", decision, count
        for worker in self.registry.workers.values():
            for outcome, count in worker.outcomes.items():
                yield "legs", (worker.config.role, worker.name, outcome), count
        for role, gate in self._entrance.gates.items():
            yield "admission_rejections", (role, "full"), gate.rejected_full
            yield "admission_rejections", (role, "late"), gate.rejected_late
        for ended, count in self._hold.ended.items():
            yield "held_requests_ended", ended, count
        if self.quotas is not None:
            for (name, limit), count in self.quotas.rejected.items():
                yield "quota_rejections", (name, limit), count
        for failover, count in self._dispatcher.failovers.items():
            yield "failovers", failover, count

    async def _tick(self) -> None:
        """Look for what no event reports: time that is up, a changed file, places that another process has freed."""
        while True:
            await asyncio.sleep(_TICK_SECONDS)
            now = monotonic()
            for client in [client for client in self._answering.clients if client.deadline < now]:
                client.interrupt(ApiError(504, "The request took longer than this deployment allows."))
            if self.keys is not None and (self._key_look is None or self._key_look.done()):
                self._key_look = self._loop.create_task(self._look_at_keys(self.keys))
            self._trials.look()
            self._entrance.refresh()
            self.registry.remove_left()
            if self._pages is not None:
                self._pages.write(self.metrics.snapshot())


def _configuration(read_again: Callable[[], ProxyConfig]) -> ProxyConfig | str:
    """Return the configuration as it is now, or why it cannot be used."""
    try:
        return read_again()
    except PdserveError as error:
        log.error("the configuration stays as it was: %s", error.what)
        return f"not usable: {error.what}"


def write_stderr(lines: bytes) -> None:
    """Write the request log where the rest of the log goes. Its end is not ours to die of."""
    with contextlib.suppress(OSError):
        sys.stderr.buffer.write(lines)
        sys.stderr.buffer.flush()


def _no_other_process(_: dict[str, Any]) -> None:
    """Do nothing: this process is the only one."""
