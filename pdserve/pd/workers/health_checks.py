"""The proxy's own look at its workers, beside the launcher's states: alive, and how full their KV cache is."""

from __future__ import annotations

import asyncio
import logging
import re
from collections import Counter
from collections.abc import Callable

from pdserve.pd.config.settings import HealthSettings
from pdserve.pd.http.fetch import FetchError, fetch
from pdserve.pd.workers.registry import Registry, Worker

log = logging.getLogger("pdserve.proxy")

_RETURN_SECONDS = 0.25
"""Between two checks of a worker that does not answer: no request is to be turned away once it does again."""
_NO_SOCKETS = re.compile(rb'^pdserve_patch_effects_total\{[^}]*effect="out-of-sockets"[^}]*\} ([0-9.eE+-]+)$', re.M)
_TOKENS = re.compile(rb"^vllm:(?:prompt|generation)_tokens_total(?:\{[^}]*\})? ([0-9.eE+-]+)$", re.M)
_KV_USAGE = re.compile(rb"^vllm:kv_cache_usage_perc(?:\{[^}]*\})? ([0-9.eE+-]+)$", re.M)


class HealthChecks:
    """One task for each worker. `changed` is called when a worker's health or KV use has changed."""

    def __init__(
        self, registry: Registry, settings: HealthSettings, headers: bytes, changed: Callable[[], None]
    ) -> None:
        self._registry, self._settings, self._headers, self._changed = registry, settings, headers, changed
        self._tasks: dict[Worker, asyncio.Task[None]] = {}
        """By worker, as all below: another one of the same name may come while the task of the first still sleeps."""
        self._missed: Counter[Worker] = Counter()
        """Pages of figures in a row that did not come."""
        self._counted: dict[Worker, float] = {}
        """Tokens that each worker has counted, of those whose page of figures shows them."""
        self._lacked: dict[Worker, float] = {}
        """How often each worker has had no socket, when it was looked at last."""
        self._starving: set[Worker] = set()
        """Workers of which that number rises. What they are sent fails, though they answer every check."""

    def watch(self, worker: Worker) -> None:
        """Begins to look at a worker, until it is removed from the registry."""
        if worker not in self._tasks:
            task = self._tasks[worker] = asyncio.ensure_future(self._look(worker))
            task.add_done_callback(lambda _: self._forget(worker))

    def stop(self) -> None:
        for task in self._tasks.values():
            task.cancel()

    def _forget(self, worker: Worker) -> None:
        del self._tasks[worker]
        del self._missed[worker]
        self._counted.pop(worker, None)
        self._lacked.pop(worker, None)
        self._starving.discard(worker)

    async def _look(self, worker: Worker) -> None:
        failures = 0
        while self._registry.workers.get(worker.name) is worker:
            if worker.state in ("ready", "draining"):
                failures = 0 if await self._answers(worker) else failures + 1
                self._judge(worker, failures)
                if not failures:
                    # Not before: one that goes on after a pause takes requests while its page is still being made.
                    await self._read_figures(worker)
                    self._judge(worker, failures)
            else:
                failures = 0
            comes_back = not worker.healthy and worker not in self._starving
            seconds = self._settings.interval_seconds
            await asyncio.sleep(min(_RETURN_SECONDS, seconds) if comes_back else seconds)

    def _judge(self, worker: Worker, failures: int) -> None:
        starving = worker in self._starving
        healthy = failures < self._settings.failures and not starving
        if healthy != worker.healthy and (healthy is False or failures == 0):
            why = "out of sockets or file descriptors (raise its ulimit -n)" if starving else "not healthy"
            log.warning("%s is %s", worker.name, "healthy again" if healthy else f"{why}: not used")
            self._registry.set_health(worker, healthy)
            self._changed()

    async def _answers(self, worker: Worker) -> bool:
        began = asyncio.get_running_loop().time()
        try:
            health = await fetch(worker.pool, "GET", "/health", timeout=self._settings.timeout_seconds)
        except FetchError as error:
            if worker.heard > began or error.ours:
                # It has answered a request meanwhile. One that many requests keep busy is not one that is gone.
                return True
            if worker.healthy:
                log.info("%s: %s", worker.name, error)
            return False
        return health.status == 200

    async def _read_figures(self, worker: Worker) -> None:
        limit = self._settings.timeout_seconds
        try:
            figures = await fetch(worker.pool, "GET", "/metrics", headers=self._headers, timeout=limit)
        except FetchError as error:
            # A page that takes seconds is the sign of a busy machine, not of an engine that cannot serve.
            self._missed[worker] += 1
            log.info("%s: no new figure of its KV use: %s", worker.name, error)
            if self._missed[worker] >= self._settings.failures:
                self._counted.pop(worker, None)
                self._is_as_full(worker, 0.0)  # unknown: no request is refused because of an old figure for ever
                self._starving.discard(worker)
            return
        self._missed[worker] = 0
        # An engine with several ranks is as full as its fullest one.
        self._is_as_full(worker, max(map(float, _KV_USAGE.findall(figures.body)), default=0.0))
        self._has_counted(worker, [float(count) for count in _TOKENS.findall(figures.body)])
        self._has_lacked(worker, sum(map(float, _NO_SOCKETS.findall(figures.body))))

    def shows_tokens(self, worker: Worker) -> bool:
        """Return whether a worker that computes for long without an answer is known to be alive."""
        return worker in self._counted

    def _has_counted(self, worker: Worker, counts: list[float]) -> None:
        """An engine that computes counts tokens, also those of an answer that is sent as a whole."""
        if not counts:
            self._counted.pop(worker, None)
            return
        total = sum(counts)
        if total != self._counted.get(worker, total):
            worker.judgement.alive = asyncio.get_running_loop().time()
        self._counted[worker] = total

    def _has_lacked(self, worker: Worker, times: float) -> None:
        """The first look at a worker shows nothing: it may have been long ago."""
        if times > self._lacked.get(worker, times):
            self._starving.add(worker)
        else:
            self._starving.discard(worker)
        self._lacked[worker] = times

    def _is_as_full(self, worker: Worker, usage: float) -> None:
        if usage != worker.kv_usage:
            worker.kv_usage = usage
            self._changed()
