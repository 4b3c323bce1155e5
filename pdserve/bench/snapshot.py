"""What is read of a deployment: snapshots before and after a measurement, of counters over HTTP, of its record and of
the clocks, and what grew between two of them; while a client runs, CPU time and the engines' gauges."""

from __future__ import annotations

import asyncio
import hashlib
import math
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import httpx
from prometheus_client.samples import Sample

from pdserve.bench.figures import RequestRecord
from pdserve.observe.metrics import EngineSnapshot, engine_snapshot, read_metrics
from pdserve.pd.telemetry.metrics_page import PREFIX
from pdserve.plan.frozen import Frozen
from pdserve.plan.model import Plan
from pdserve.run.directory import RunDir, phase_now
from pdserve.run.state import DeploymentState
from pdserve.system import procfs
from pdserve.system.host import is_here
from pdserve.system.pressure import used_seconds, wanted_seconds


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
    """Seconds of the two clocks, read together."""

    wall: float
    monotonic: float


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


UNREAD = Counts(error="it was not read")


def sum_growth(before: Mapping[str, Counts], after: Mapping[str, Counts], names: Iterable[str]) -> dict[str, float]:
    """Return what several processes have counted together; nothing when one could not be read, for what it has counted
    is not known. A counter that appears in between began at 0."""
    together: dict[str, float] = {}
    for name in names:
        first, last = before.get(name, UNREAD), after.get(name, UNREAD)
        if first.error or last.error:
            return {}
        for counter, value in last.values.items():
            together[counter] = together.get(counter, 0.0) + value - first.values.get(counter, 0.0)
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
    return Clocks(wall=time.time(), monotonic=time.monotonic())


_SECONDS = 0.1
_BUSY_SECONDS = 10.0
"""A window in which a client may not be saturated: one that was for a part of a long run has latencies of its own
there."""
_FAMILY_SECONDS = 2.0
_GAUGES_SECONDS = 2.0
"""A scrape costs an engine more than a look into /proc, and an engine that does not answer must not delay that."""


@dataclass(frozen=True)
class CpuSample:
    """Holds what was seen at a moment of CLOCK_MONOTONIC, the clock of the client's records."""

    at: float
    client: float
    wanted: Mapping[int, float]
    """The share that the main thread of each of its processes wanted."""
    proxy: float | None


class CpuUse(Frozen):
    """Tells how much CPU a program used between the first request and the last answer, in cores. None: it was not
    measured."""

    used: float | None = None
    wanted: float | None = None
    """The share of the time in which the main thread of its busiest process ran or waited for a CPU."""


class Peaks(Frozen):
    """The largest values that were seen while a client ran."""

    running: int | None = None
    waiting: int | None = None
    kv_usage: float | None = None
    """0 to 1, of the fullest engine."""


class Sampler:
    """Runs beside a client until it is cancelled."""

    def __init__(self, client: int, proxy: frozenset[int], looker: CounterReader) -> None:
        """Begin with no samples. `client`: the PID of the client. `proxy`: the PIDs of the proxy on this machine;
        empty: it is on another."""
        self._client = client
        self._proxy = proxy
        self._looker = looker
        self._family = frozenset({client})
        self._titles: dict[int, str] = {}
        self._snapshots: list[list[EngineSnapshot]] = []
        self.samples: list[CpuSample] = []

    async def run(self) -> None:
        await asyncio.gather(self._read_cpu(), self._read_gauges(), self._find_family())

    async def _read_gauges(self) -> None:
        while True:
            self._snapshots.append(await self._looker.snapshots())
            await asyncio.sleep(_GAUGES_SECONDS)

    async def _find_family(self) -> None:
        """Find the client's processes, again and again. A client may be many processes. Looking at all of /proc for
        them costs too much to do it for every sample."""
        while True:
            self._family = frozenset(await asyncio.to_thread(procfs.family, {self._client}))
            self._titles |= {pid: procfs.command(pid) for pid in self._family}
            await asyncio.sleep(_FAMILY_SECONDS)

    def titled(self, titles: Collection[str]) -> frozenset[int]:
        """Return the processes of the client whose title begins with one of these; all, if none has."""
        chosen = {pid for pid, title in self._titles.items() if title.startswith(tuple(titles))}
        return frozenset(chosen or self._titles or {self._client})

    async def _read_cpu(self) -> None:
        while True:
            self.samples.append(
                CpuSample(
                    time.monotonic(),
                    used_seconds(self._family),
                    wanted_seconds(self._family),
                    used_seconds(self._proxy) if self._proxy else None,
                )
            )
            await asyncio.sleep(_SECONDS)

    @property
    def peaks(self) -> Peaks:
        return peaks_of(self._snapshots)


def peaks_of(readings: Sequence[Sequence[EngineSnapshot]]) -> Peaks:
    """Return the sums over all engines at the worst moment. Those that did not answer are left out."""
    running, waiting, kv_usage = [], [], []
    for seen in readings:
        if known := [snapshot.running for snapshot in seen if snapshot.running is not None]:
            running.append(sum(known))
        if known := [snapshot.waiting for snapshot in seen if snapshot.waiting is not None]:
            waiting.append(sum(known))
        kv_usage += [snapshot.kv_cache_usage for snapshot in seen if snapshot.kv_cache_usage is not None]
    return Peaks(
        running=max(running, default=None),
        waiting=max(waiting, default=None),
        kv_usage=max(kv_usage, default=None),
    )


def cpu_use(
    samples: Sequence[CpuSample], records: Sequence[RequestRecord], timing: Collection[int] | None = None
) -> tuple[CpuUse, CpuUse]:
    """Return the use of CPUs by the client and by the proxy, between the first request and the last answer: what the
    client needs for its imports, its prompts and its report is no part of it. `timing`: those PIDs of the client that
    take the times; None: all."""
    done = [record for record in records if record.ok]
    if not done:
        return CpuUse(), CpuUse()
    began, ended = min(record.started for record in records), max(record.ended for record in done)
    inside = [sample for sample in samples if began <= sample.at <= ended]
    if len(inside) < 2:
        return CpuUse(), CpuUse()
    first, last = inside[0], inside[-1]
    seconds = last.at - first.at
    proxy = None if last.proxy is None or first.proxy is None else (last.proxy - first.proxy) / seconds
    wanted = max(_busy(inside, timing), default=None)
    # A process of the client that has ended in between takes its time along.
    return CpuUse(used=max(0.0, last.client - first.client) / seconds, wanted=wanted), CpuUse(used=proxy)


def _busy(inside: Sequence[CpuSample], timing: Collection[int] | None) -> Iterator[float]:
    """Yield shares of the time in which a main thread wanted a CPU: in all of it, and in every window of ten
    seconds."""
    yield from _shares(inside[0], inside[-1], timing)
    begin = 0
    for last in inside:
        while last.at - inside[begin + 1].at >= _BUSY_SECONDS:
            begin += 1
        if last.at - inside[begin].at >= _BUSY_SECONDS:
            yield from _shares(inside[begin], last, timing)


def _shares(first: CpuSample, last: CpuSample, timing: Collection[int] | None) -> Iterator[float]:
    """Yield for each process the share of the time in which it ran or waited for a CPU."""
    for pid in first.wanted.keys() & last.wanted.keys():
        if timing is None or pid in timing:
            yield (last.wanted[pid] - first.wanted[pid]) / (last.at - first.at)


def proxy_pids(plan: Plan, state: DeploymentState) -> frozenset[int]:
    """Return the proxy's processes, if they are on this machine."""
    name = next(process.name for process in plan.processes if process.is_proxy)
    process, node = state.processes[name], state.nodes.get(state.processes[name].node)
    if process.id is None or node is None or not is_here(node.hostname, node.place):
        return frozenset()
    return frozenset(procfs.family({process.id.pid}))
