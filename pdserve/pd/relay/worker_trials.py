"""Canaries for workers in doubt, and the end of the wait for one that is silent while its siblings answer.

A worker may compute for long before it answers: a long prompt, an answer that is sent as a whole, a queue. So silence
alone is no fault. A request leaves its worker only when all of this holds:

- for `PATIENCE_SECONDS`, an interval of the health checks, and the time of all the prompts that it has at
  `SLOWEST_PREFILL`, the worker has sent nothing to anybody and counted no token; twice as long for each earlier try;
- requests that a sibling has now, and which still wait for their first byte, have not waited half as long;
- the worker has not answered a canary meanwhile;
- a sibling which this request has not tried has: so where all engines are busy for long, none is left.

Nothing of an answer has reached the client then. What the worker holds of it is given back as after any failure
(protocols).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from time import monotonic
from typing import Final

from pdserve.pd.errors import ApiError
from pdserve.pd.relay.waiting import Watch
from pdserve.pd.requests.request import ClientRequest
from pdserve.pd.workers.failure import WorkerFailedError
from pdserve.pd.workers.health_checks import HealthChecks
from pdserve.pd.workers.judgement import ATTEMPTS, Fault
from pdserve.pd.workers.registry import Registry, Worker
from pdserve.roles import EngineRole

log = logging.getLogger("pdserve.proxy")

Canary = Callable[[Worker, Worker, float], Awaitable[None]]
"""Sends one token of nobody's through this pair of prefill and decode; one worker twice: through that alone. ApiError:
it was not answered; 504: not within so many seconds."""

PATIENCE_SECONDS = 5.0
SLOWEST_PREFILL = 500
"""Tokens a second."""
CANARY_SECONDS = 3.0
_LATE: Final = 504
_AGAIN_SECONDS: Final = 5.0
"""Between two canaries to one that is not doubtful: the partner of the first may have failed."""


class WorkerTrials:
    """Looks at the workers of one proxy process whenever it is told to."""

    def __init__(self, registry: Registry, canary: Canary, health: HealthChecks, interval: float) -> None:
        """Begin without a trial. `interval`: seconds between two health checks."""
        self._registry, self._canary, self._health, self._interval = registry, canary, health, interval
        self._loop = asyncio.get_running_loop()
        self._tasks: dict[Worker, asyncio.Task[None]] = {}
        self._began: dict[Worker, float] = {}
        """Loop time of each worker's last canary."""
        registry.on_lost(self._forget)

    def look(self) -> None:
        """Sends the canaries that are due, and ends waits that are vain."""
        now = self._loop.time()
        for worker in list(self._registry.workers.values()):
            if worker.state != "ready":
                continue
            if worker.healthy and worker.judgement.is_due(now):
                self._try(worker)
            elif worker.watches and now - worker.judgement.alive > PATIENCE_SECONDS:
                self._end_vain_waits(worker, now)

    def stop(self) -> None:
        for task in self._tasks.values():
            task.cancel()

    def _forget(self, worker: Worker) -> None:
        self._began.pop(worker, None)

    # --- a worker that is silent

    def _end_vain_waits(self, worker: Worker, now: float) -> None:
        watches = _watches(worker)
        relayed = max(watch.client.last_byte for watch in watches)
        silent = min(now - worker.judgement.alive, monotonic() - relayed)
        if silent <= PATIENCE_SECONDS:
            return
        siblings = [other for other in self._registry.ready(worker.config.role) if other is not worker]
        serving = [other for other in siblings if now - other.judgement.alive <= PATIENCE_SECONDS]
        longest = max((_waited(watch, other) for other in serving for watch in _watches(other)), default=0.0)
        for watch in watches:
            asked = watch.client.asked
            waited = min(silent, _waited(watch, worker))
            if asked is None or asked.attempts >= ATTEMPTS or waited < max(self._patience(asked, worker), 2 * longest):
                continue
            untried = [other for other in siblings if other.name not in asked.tried]
            if untried and self._must_be_heard(asked, worker):
                unheard = [other for other in (worker, *untried) if now - other.judgement.alive >= waited]
                self._ask(unheard, now)
                known = not any(other in self._tasks and not other.judgement.doubtful for other in unheard)
                if known and worker.judgement.doubtful and len(unheard) <= len(untried):
                    watch.leave(worker)

    def _ask(self, unheard: list[Worker], now: float) -> None:
        for worker in unheard:
            if not worker.judgement.doubtful and now - self._began.get(worker, -_AGAIN_SECONDS) >= _AGAIN_SECONDS:
                self._try(worker)

    def _patience(self, asked: ClientRequest, worker: Worker) -> float:
        prompts = max(asked.ask.estimate, worker.prompt_tokens) / SLOWEST_PREFILL
        return (PATIENCE_SECONDS + self._interval + prompts) * 2.0 ** (asked.attempts - 1)

    def _must_be_heard(self, asked: ClientRequest, worker: Worker) -> bool:
        """Return whether the worker could not compute for so long unheard: a prefill has one token to make, a stream
        begins with its first one, and of others it is seen in the figures."""
        return worker.config.role == "prefill" or self._health.shows_tokens(worker) or asked.body.get("stream") is True

    # --- canaries

    def _try(self, worker: Worker) -> None:
        if worker not in self._tasks:
            task = self._tasks[worker] = self._loop.create_task(self._send(worker))
            task.add_done_callback(lambda _: self._tasks.pop(worker, None))

    async def _send(self, worker: Worker) -> None:
        began = self._began[worker] = self._loop.time()
        prefill, decode = self._pair(worker)
        judgement = worker.judgement
        judgement.canary_begins(began)
        try:
            await self._canary(prefill, decode, CANARY_SECONDS)
            log.info("%s has answered a canary", worker.name)
        except ApiError as error:
            self._judge(error, prefill, decode, began)
        finally:
            judgement.canary_ended()

    def _pair(self, worker: Worker) -> tuple[Worker, Worker]:
        """Pair a worker with who is most likely to answer, or with itself where there is nobody."""
        role: EngineRole = "prefill" if worker.config.role == "decode" else "decode"
        others = self._registry.ready(role) if role in self._registry.roles else ()
        other = max(others, key=lambda other: other.judgement.alive, default=worker)
        return (other, worker) if role == "prefill" else (worker, other)

    def _judge(self, error: ApiError, prefill: Worker, decode: Worker, began: float) -> None:
        """Judge which of the two has failed with a canary. A refusal (4xx) is no failure: not every model completes."""
        cause, now = error.__cause__, self._loop.time()
        worker: Worker | None = None
        fault: Fault | None = None
        if isinstance(cause, WorkerFailedError):
            worker, fault = cause.worker, cause.fault
        elif error.status == _LATE:
            fault = "silent"
            worker = next((one for one in (prefill, decode) if one.judgement.alive < began), None)
        if worker is None:
            return
        log.warning("%s failed with a canary: %s", worker.name, error)
        if fault is None or fault == "absent":
            worker.judgement.canary_refused()
        else:
            worker.judgement.canary_failed(fault, now)


def _watches(worker: Worker) -> list[Watch]:
    return [watch for watch in worker.watches if isinstance(watch, Watch)]


def _waited(watch: Watch, worker: Worker) -> float:
    """Return the seconds for which a request has waited for the first byte of this worker; 0: for none of it."""
    leg = watch.awaited
    if leg is None or leg.worker is not worker:
        return 0.0
    begins = max(other.first_byte for other in watch.legs)
    return monotonic() - max(leg.began, begins)
