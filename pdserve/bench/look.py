"""Takes a snapshot of a running deployment: metrics over HTTP, the record of the run, the clocks."""

from __future__ import annotations

import asyncio
import hashlib
import time

import httpx

from pdserve.bench.snapshot import ENGINE, LMCACHE, PROXY, Clocks, Counts, DeploymentSnapshot, counts
from pdserve.observe.metrics import EngineSnapshot, engine_snapshot, read_metrics
from pdserve.patches.record import active_in_all
from pdserve.plan.model import Plan
from pdserve.run.directory import RunDir, phase_now
from pdserve.run.patch_proof import records

_SETTLE_SECONDS = 15.0
"""Engines count a step after they have answered, and LMCache stores in the background."""
_LOOK_SECONDS = 0.5


class Looker:
    """Of a run. `plan`: with the URLs of LMCache servers as `client` reaches them."""

    def __init__(self, run: RunDir, plan: Plan, client: httpx.AsyncClient) -> None:
        self._run = run
        self._plan = plan
        self._client = client

    async def snapshot(self) -> DeploymentSnapshot:
        """What cannot be read has the reason in its place. Raises StateError when the run has no record any more."""
        engines, caches = self._plan.proxy.workers, self._plan.lmcache
        pages = await asyncio.gather(
            *(read_metrics(worker.url, self._client) for worker in engines),
            *(read_metrics(server.http_url, self._client) for server in caches),
        )
        proxy = await self._proxy()
        state = self._run.read_state()
        return DeploymentSnapshot(
            clocks=clocks(),
            run_id=state.run_id,
            phase=phase_now(self._run, state),
            plan=plan_digest(self._run.read_plan()),
            lives={
                name: f"{process.id} restarts={process.restarts}"
                for name, process in state.processes.items()
                if process.phase != "done"
            },
            engines={worker.name: counts(page, ENGINE) for worker, page in zip(engines, pages, strict=False)},
            caches={
                server.process: counts(page, LMCACHE)
                for server, page in zip(caches, pages[len(engines) :], strict=True)
            },
            proxy=proxy,
            patches={worker.name: self._patches(worker.name) for worker in engines},
        )

    async def settled(self) -> DeploymentSnapshot:
        """The second of two equal readings in which all could be read; the last, if there are none. Where something
        has died there is nothing to wait for."""
        until = time.monotonic() + _SETTLE_SECONDS
        before = await self.snapshot()
        while time.monotonic() < until:
            await asyncio.sleep(_LOOK_SECONDS)
            after = await self.snapshot()
            if _counted(before) == _counted(after) and (self._whole(after) or after.phase != "ready"):
                return after
            before = after
        return before

    def _whole(self, snapshot: DeploymentSnapshot) -> bool:
        """Whether everything could be read that this deployment counts."""
        parts = [*snapshot.engines.values(), *snapshot.caches.values()]
        if self._plan.proxy_kind == "pdserve":
            parts.append(snapshot.proxy)
        return not any(part.error for part in parts)

    async def snapshots(self) -> list[EngineSnapshot]:
        """Of the engines' gauges."""
        urls = [worker.url for worker in self._plan.proxy.workers]
        return list(await asyncio.gather(*(engine_snapshot(url, self._client) for url in urls)))

    def _patches(self, engine: str) -> tuple[str, ...]:
        """A plan has those that it was started with; of code that it does not know a patch may leave itself out."""
        instance = self._plan.instance_of(engine)
        return active_in_all(record for process in instance for record in records(self._run, process.name))

    async def _proxy(self) -> Counts:
        if self._plan.proxy_kind != "pdserve":
            return Counts(error="it is vllm-router, whose counters have other names")
        return counts(await read_metrics(self._plan.proxy_url, self._client), PROXY)


def plan_digest(plan: Plan) -> str:
    """As a snapshot has it, of a plan that was read."""
    return hashlib.sha256(plan.model_dump_json().encode()).hexdigest()


def _counted(snapshot: DeploymentSnapshot) -> tuple[object, ...]:
    return snapshot.engines, snapshot.caches, snapshot.proxy


def clocks() -> Clocks:
    """Read within microseconds of each other."""
    return Clocks(wall=time.time(), monotonic=time.monotonic(), boot=time.clock_gettime(time.CLOCK_BOOTTIME))
