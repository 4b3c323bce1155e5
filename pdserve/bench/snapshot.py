"""Snapshots of a deployment: counters over HTTP, its record, the clocks, and what grew between two of them."""

from __future__ import annotations

import asyncio
import hashlib
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import httpx
from prometheus_client.samples import Sample

from pdserve.observe.metrics import EngineSnapshot, engine_snapshot, read_metrics
from pdserve.patches.record import active_in_all
from pdserve.pd.telemetry.metrics_page import PREFIX
from pdserve.plan.frozen import Frozen
from pdserve.plan.model import Plan
from pdserve.run.directory import RunDir, phase_now
from pdserve.run.patch_proof import records


@dataclass(frozen=True)
class Counter:
    """A metric that only grows. `where`: labels that its samples must have; the others are added up."""

    metric: str
    where: Mapping[str, str] = field(default_factory=dict)
    appears: str = ""
    """How metrics begin, any of which on a page says that this one counts there, and is missing until it has counted
    something. Empty: it is there from the start."""
    title: str = ""
    """What it counts, where a verdict says so."""

    def total(self, samples: Sequence[Sample]) -> float | None:
        """Sum the counter's series; None: it is not reported, or is no number."""
        values = [s.value for s in samples if s.name == self.metric and self.where.items() <= s.labels.items()]
        if not values and self.appears and any(s.name.startswith(self.appears) for s in samples):
            return 0.0
        return sum(values) if values and all(map(math.isfinite, values)) else None


def _failure(metric: str, title: str) -> Counter:
    return Counter(f"vllm:{metric}_total", title=title)


def _effect(patch: str, effect: str, title: str) -> Counter:
    return Counter("pdserve_patch_effects_total", {"patch": patch, "effect": effect}, title=title)


FAILED_TRANSFERS: Mapping[str, Counter] = {
    "nixl_failed": _failure("nixl_num_failed_transfers", "NIXL transfers that failed"),
    "nixl_expired": _failure("nixl_num_kv_expired_reqs", "requests whose KV expired on prefill"),
    "nixl_groups_failed": _effect("nixl-failed-groups", "failed-receives", "NIXL transfers that failed"),
    "mooncake_failed": _failure("mooncake_num_failed_transfers", "Mooncake transfers that failed"),
    "mooncake_not_received": _failure("mooncake_num_failed_recvs", "prompts that Mooncake did not bring"),
    "mooncake_expired": _failure("mooncake_num_kv_expired_reqs", "requests whose KV expired on prefill"),
    "pulls_failed": _effect("mooncake-pulls", "pulls-failed", "Mooncake pulls that failed"),
    "peers_lost": _effect("mooncake-pulls", "peers-lost", "prefill workers lost during a pull"),
    "params_rejected": _effect("mooncake-requests", "params-rejected", "requests served without their transfer"),
    "loads_given_up": _effect("load-timeout", "loads-given-up", "loads of KV that took too long"),
}
"""Any of them: the figures are of something else than prefill/decode. Before vllm 0.33 the patch mooncake-prom-metrics
exports what Mooncake counts."""


def _prompt_tokens(source: str) -> Counter:
    return Counter("vllm:prompt_tokens_by_source_total", {"source": source})


def _saved_keys(metric: str) -> Counter:
    return Counter(f"vllm:mooncake_store_operation_{metric}_total", {"operation": "save_put"})


ENGINE: Mapping[str, Counter] = {
    "computed": _prompt_tokens("local_compute"),
    "local_hits": _prompt_tokens("local_cache_hit"),
    "received": _prompt_tokens("external_kv_transfer"),
    "generated": Counter("vllm:generation_tokens_total"),
    "preemptions": Counter("vllm:num_preemptions_total"),
    "queue_seconds": Counter("vllm:request_queue_time_seconds_sum"),
    "prefill_seconds": Counter("vllm:request_prefill_time_seconds_sum"),
    "decode_seconds": Counter("vllm:request_decode_time_seconds_sum"),
    "nixl_bytes": Counter("vllm:nixl_bytes_transferred_sum"),
    "nixl_seconds": Counter("vllm:nixl_xfer_time_seconds_sum"),
    "mooncake_bytes": Counter("vllm:mooncake_bytes_transferred_sum"),
    "mooncake_seconds": Counter("vllm:mooncake_xfer_time_seconds_sum"),
    "store_keys": _saved_keys("keys"),
    "store_failed": _saved_keys("failed_keys"),
    "offload_bytes": Counter("vllm:kv_offload_store_bytes_total"),
    **FAILED_TRANSFERS,
}


def _lmcache(name: str) -> Counter:
    """Describe a counter of LMCache. OpenTelemetry shows a counter only once it has counted; LMCache's gauges are there
    from its start."""
    return Counter(f"lmcache_mp_{name}_total", appears="lmcache_mp_")


LMCACHE: Mapping[str, Counter] = {
    "written": _lmcache("l1_write_chunks"),
    "read": _lmcache("l1_read_chunks"),
    "l2_written": _lmcache("l2_store_completed_objects_chunks"),
    "evicted": _lmcache("l1_evicted_chunks"),
    "asked_tokens": _lmcache("lookup_requested_tokens"),
    "hit_tokens": _lmcache("lookup_hit_tokens"),
}
PROXY: Mapping[str, Counter] = {
    "requests": Counter(f"{PREFIX}requests_total"),
    "tokenized": Counter(f"{PREFIX}requests_total", {"path": "/tokenize"}),
    "failovers": Counter(f"{PREFIX}failovers_total"),
    "single_engine": Counter(f"{PREFIX}disagg_decisions_total", {"decision": "one-engine"}),
    "queue_seconds": Counter(f"{PREFIX}queue_seconds_sum"),
    # From prefill's answer to decode's first byte.
    "transfer_seconds": Counter(f"{PREFIX}kv_transfer_seconds_sum"),
}


class Counts(Frozen):
    """Holds the counters of a process. A counter that it does not report is missing."""

    values: Mapping[str, float] = {}
    error: str = ""
    """Why there are none."""


def counts(samples: Iterable[Sample] | str, of: Mapping[str, Counter]) -> Counts:
    """Sum the counters in `samples`, which are what observe.metrics.read_metrics returns."""
    if isinstance(samples, str):
        return Counts(error=samples)
    samples = list(samples)
    totals = {name: counter.total(samples) for name, counter in of.items()}
    return Counts(values={name: total for name, total in totals.items() if total is not None})


class Clocks(Frozen):
    """Seconds of the three clocks, read together."""

    wall: float
    monotonic: float
    boot: float
    """Goes on while the machine is suspended; the monotonic clock does not."""


class DeploymentSnapshot(Frozen):
    """Holds all that is read of a deployment at a moment."""

    clocks: Clocks
    run_id: str
    phase: str
    plan: str
    """Digest of plan.json."""
    lives: Mapping[str, str]
    """Process -> what identifies its present life."""
    engines: Mapping[str, Counts] = {}
    caches: Mapping[str, Counts] = {}
    proxy: Counts = Counts()
    patches: Mapping[str, tuple[str, ...]] = {}
    """Engine -> the patches that are active in all of its processes, as these have reported them."""


UNREAD = Counts(error="it was not read")


def count_growth(before: Counts, after: Counts) -> dict[str, float]:
    """Return what was counted in between; nothing unless both could be read. A counter that appears in between began at
    0."""
    if before.error or after.error:
        return {}
    return {name: value - before.values.get(name, 0.0) for name, value in after.values.items()}


def sum_growth(before: Mapping[str, Counts], after: Mapping[str, Counts], names: Iterable[str]) -> dict[str, float]:
    """Return what several processes have counted together; nothing when one could not be read, for what it has counted
    is not known."""
    together: dict[str, float] = {}
    for name in names:
        first, last = before.get(name, UNREAD), after.get(name, UNREAD)
        if first.error or last.error:
            return {}
        for counter, value in count_growth(first, last).items():
            together[counter] = together.get(counter, 0.0) + value
    return together


_SETTLE_SECONDS = 15.0
"""Engines count a step after they have answered, and LMCache stores in the background."""
_LOOK_SECONDS = 0.5


class CounterReader:
    """Looks at the counters of a run. `plan`: with the URLs of LMCache servers as `client` reaches them."""

    def __init__(self, run: RunDir, plan: Plan, client: httpx.AsyncClient) -> None:
        self._run = run
        self._plan = plan
        self._client = client

    async def snapshot(self) -> DeploymentSnapshot:
        """Read everything once. What cannot be read has the reason in its place. Raises StateError when the run has no
        record any more."""
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
        """Return the second of two equal readings in which all could be read; the last, if there are none. Where
        something has died there is nothing to wait for."""
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
        """Return whether everything could be read that this deployment counts."""
        parts = [*snapshot.engines.values(), *snapshot.caches.values()]
        if self._plan.proxy_kind == "pdserve":
            parts.append(snapshot.proxy)
        return not any(part.error for part in parts)

    async def snapshots(self) -> list[EngineSnapshot]:
        """Read the engines' gauges."""
        urls = [worker.url for worker in self._plan.proxy.workers]
        return list(await asyncio.gather(*(engine_snapshot(url, self._client) for url in urls)))

    def _patches(self, engine: str) -> tuple[str, ...]:
        """Return the patches that are active in an engine. A plan has those that the engine was started with; of code
        that it does not know a patch may leave itself out."""
        instance = self._plan.instance_of(engine)
        return active_in_all(record for process in instance for record in records(self._run, process.name))

    async def _proxy(self) -> Counts:
        if self._plan.proxy_kind != "pdserve":
            return Counts(error="it is vllm-router, whose counters have other names")
        return counts(await read_metrics(self._plan.proxy_url, self._client), PROXY)


def plan_digest(plan: Plan) -> str:
    """Return the digest of a plan as a snapshot has it."""
    return hashlib.sha256(plan.model_dump_json().encode()).hexdigest()


def _counted(snapshot: DeploymentSnapshot) -> tuple[object, ...]:
    return snapshot.engines, snapshot.caches, snapshot.proxy


def clocks() -> Clocks:
    """Read within microseconds of each other."""
    return Clocks(wall=time.time(), monotonic=time.monotonic(), boot=time.clock_gettime(time.CLOCK_BOOTTIME))
