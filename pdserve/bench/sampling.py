"""CPU time of the client and of the proxy, and the engines' gauges, sampled while a client runs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from pdserve.bench.figures import RequestRecord
from pdserve.bench.snapshot import CounterReader
from pdserve.bench.validity import CpuUse
from pdserve.observe.metrics import EngineSnapshot
from pdserve.plan.frozen import Frozen
from pdserve.plan.model import Plan
from pdserve.run.state import DeploymentState
from pdserve.system import procfs
from pdserve.system.host import is_here
from pdserve.system.pressure import used_seconds, wanted_seconds

_SECONDS = 0.1
_BUSY_SECONDS = 10.0
"""Of the window in which a client may not be saturated: one that was for a part of a long run has latencies of its own
there."""
_FAMILY_SECONDS = 2.0
_GAUGES_SECONDS = 2.0
"""A scrape costs an engine more than a look into /proc, and an engine that does not answer must not delay that."""


@dataclass(frozen=True)
class Sample:
    """Holds what was seen at a moment of CLOCK_MONOTONIC, the clock of the client's records."""

    at: float
    client: float
    wanted: Mapping[int, float]
    """The share that the main thread of each of its processes wanted."""
    proxy: float | None


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
        self.samples: list[Sample] = []

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
                Sample(
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
    samples: Sequence[Sample], records: Sequence[RequestRecord], timing: Collection[int] | None = None
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


def _busy(inside: Sequence[Sample], timing: Collection[int] | None) -> Iterator[float]:
    """Yield shares of the time in which a main thread wanted a CPU: in all of it, and in every window of ten
    seconds."""
    yield from _shares(inside[0], inside[-1], timing)
    begin = 0
    for last in inside:
        while last.at - inside[begin + 1].at >= _BUSY_SECONDS:
            begin += 1
        if last.at - inside[begin].at >= _BUSY_SECONDS:
            yield from _shares(inside[begin], last, timing)


def _shares(first: Sample, last: Sample, timing: Collection[int] | None) -> Iterator[float]:
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
