"""Look at a deployment again and again: what `status` shows, the rates of the last minute, and the latest events.

A counter begins again when its process does. A reading in which any has gone down is therefore the first one of a new
life, and those before it do not count.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from prometheus_client.samples import Sample

from pdserve.observe.metrics import (
    FAILED_TRANSFERS,
    Page,
    engine_figures,
    lmcache_figures,
    read_metrics,
    store_figures,
    total,
)
from pdserve.observe.status import Endpoints, StatusView, endpoint_client, endpoints, read_recorded
from pdserve.pd.telemetry.metrics_page import PREFIX
from pdserve.run.directory import RunDir, find

SECONDS = 60.0
_ADDS_UP = ("_total", "_bucket", "_sum", "_count")
_Series = tuple[str, frozenset[tuple[str, str]]]


@dataclass(frozen=True)
class _Sample:
    at: float
    counts: Mapping[_Series, float]


@dataclass(frozen=True)
class Distribution:
    """Holds observations by upper bound: cumulative, the last one without a bound."""

    buckets: tuple[tuple[float, float], ...]

    @property
    def count(self) -> float:
        return self.buckets[-1][1] if self.buckets else 0.0

    @property
    def largest_bound(self) -> float:
        """Return the bound that no estimate exceeds; 0 without buckets."""
        return self.buckets[-2][0] if len(self.buckets) > 1 else 0.0

    def quantile(self, share: float) -> float | None:
        """Estimate a quantile as Prometheus does: even within a bucket, and the largest bound for what is beyond it.
        None without observations."""
        wanted, below, low = share * self.count, 0.0, 0.0
        if not self.count:
            return None
        for bound, upto in self.buckets:
            if upto >= wanted and upto > below:
                if math.isinf(bound):
                    return low
                share_of_bucket = (wanted - below) / (upto - below)
                return min(bound, low + (bound - low) * share_of_bucket)  # a sum of floats may be a bit above it
            low, below = bound, upto
        return None


class MetricsWindow:
    """Holds the readings of all processes within the last `seconds`."""

    def __init__(self, seconds: float = SECONDS) -> None:
        self._seconds = seconds
        self._readings: dict[str, deque[_Sample]] = {}

    def add(self, at: float, pages: Mapping[str, Page]) -> None:
        """Add one look at all processes, at a time that only grows. What did not answer is forgotten."""
        for gone in self._readings.keys() - {name for name, page in pages.items() if not isinstance(page, str)}:
            del self._readings[gone]
        for name, page in pages.items():
            if not isinstance(page, str):
                self._add(at, self._readings.setdefault(name, deque()), page)

    def _add(self, at: float, readings: deque[_Sample], samples: Iterable[Sample]) -> None:
        counts = {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for sample in samples
            if sample.name.endswith(_ADDS_UP)
        }
        if readings and any(counts.get(series, 0.0) < value for series, value in readings[-1].counts.items()):
            readings.clear()
        readings.append(_Sample(at, counts))
        while len(readings) > 2 and readings[1].at <= at - self._seconds:
            readings.popleft()

    def seconds(self, process: str) -> float:
        """Return the seconds between the first and the last reading of a process; 0 with fewer than two."""
        readings = self._readings.get(process)
        return 0.0 if readings is None else readings[-1].at - readings[0].at

    def increase(self, process: str, name: str, **labels: str) -> float | None:
        """Return what all series of that name and these labels have added. None: there is no such series, or only one
        reading."""
        if not self.seconds(process):
            return None
        first, last = self._readings[process][0].counts, self._readings[process][-1].counts
        wanted = labels.items()
        added = [
            value - first.get(series, 0.0)
            for series, value in last.items()
            if series[0] == name and wanted <= dict(series[1]).items()
        ]
        return sum(added) if added else None

    def rate(self, process: str, name: str, **labels: str) -> float | None:
        """Return the increase a second."""
        added = self.increase(process, name, **labels)
        return None if added is None else added / self.seconds(process)

    def distribution(self, processes: Iterable[str], name: str) -> Distribution | None:
        """Return the observations of a histogram, of all these processes together. None: none of them has it."""
        by_bound: dict[float, float] = {}
        for process in processes:
            if not self.seconds(process):
                continue
            first, last = self._readings[process][0].counts, self._readings[process][-1].counts
            for series, value in last.items():
                if series[0] == f"{name}_bucket":
                    bound = float(dict(series[1])["le"])
                    by_bound[bound] = by_bound.get(bound, 0.0) + value - first.get(series, 0.0)
        return Distribution(tuple(sorted(by_bound.items()))) if by_bound else None


_PROXY = "proxy"
_TTFT, _ITL = "vllm:time_to_first_token_seconds", "vllm:inter_token_latency_seconds"
_BY_SOURCE = "vllm:prompt_tokens_by_source_total"


@dataclass(frozen=True)
class Latency:
    """Holds quantiles in seconds, estimated from the buckets of a histogram. None: nothing was observed."""

    count: int
    p50: float | None
    p90: float | None
    p99: float | None
    largest_bound: float
    """An estimate that has this value may be anything above it."""


@dataclass(frozen=True)
class MinuteTraffic:
    """The traffic of clients in the last minute. None: not reported."""

    measured_by: str
    """The proxy, or the engines that write answers where the proxy has no such figures."""
    seconds: float
    """What the figures are of: less than a minute at first."""
    requests: float | None
    """Answered, a second; so are the next ones."""
    errors: float | None
    """Through engines or proxy, not through clients."""
    refused: float | None
    """429 of a full pool."""
    failovers: float | None
    prompt_tokens: float | None
    """As the engines that write answers count them, and so are the next ones: the proxy sees those of a stream only if
    its client asked for usage."""
    output_tokens: float | None
    ttft: Latency | None
    itl: Latency | None
    kv_transfer: Latency | None
    """An upper bound: from prefill's answer to decode's first byte."""


@dataclass(frozen=True)
class EngineMinute:
    """The last minute of one engine, tokens a second. None: not reported."""

    computed: float | None
    received: float | None
    """Prompt tokens whose KV was transferred to it."""
    generated: float | None
    prefix_hit_rate: float | None
    external_hit_rate: float | None
    preemptions: float | None
    """In the whole window, and so are the failures."""
    failed_transfers: float | None


@dataclass(frozen=True)
class CacheMinute:
    """The last minute of one LMCache server, chunks a second."""

    hit_rate: float | None
    stored: float | None
    read: float | None
    evicted: float | None


def minute_traffic(window: MetricsWindow, writers: Sequence[str]) -> MinuteTraffic:
    """Return the traffic of the last minute. `writers`: the engines that write answers, whose figures count where the
    proxy has none."""
    prompts = _sum([window.rate(name, "vllm:prompt_tokens_total") for name in writers])
    outputs = _sum([window.rate(name, "vllm:generation_tokens_total") for name in writers])
    if window.seconds(_PROXY):
        return _of_proxy(window, prompts, outputs)
    answered = [window.rate(name, "vllm:request_success_total") for name in writers]
    return MinuteTraffic(
        measured_by="engines",
        seconds=max(map(window.seconds, writers), default=0.0),
        requests=_sum(answered),
        errors=None,
        refused=None,
        failovers=None,
        prompt_tokens=prompts,
        output_tokens=outputs,
        ttft=_latency(window, writers, _TTFT),
        itl=_latency(window, writers, _ITL),
        kv_transfer=None,
    )


def _of_proxy(window: MetricsWindow, prompts: float | None, outputs: float | None) -> MinuteTraffic:
    def rate(name: str, **labels: str) -> float | None:
        return window.rate(_PROXY, f"{PREFIX}{name}_total", **labels)

    def counted(*rates: float | None) -> float:
        """Sum rates. A series with labels is not there before its first count."""
        return sum(each or 0.0 for each in rates)

    return MinuteTraffic(
        measured_by="proxy",
        seconds=window.seconds(_PROXY),
        requests=counted(rate("requests")),
        errors=counted(rate("errors", blame="worker"), rate("errors", blame="proxy")),
        refused=counted(rate("admission_rejections")),
        failovers=counted(rate("failovers")),
        prompt_tokens=prompts,
        output_tokens=outputs,
        ttft=_latency(window, [_PROXY], f"{PREFIX}ttft_seconds"),
        itl=_latency(window, [_PROXY], f"{PREFIX}itl_seconds"),
        kv_transfer=_latency(window, [_PROXY], f"{PREFIX}kv_transfer_seconds"),
    )


def engine_minute(window: MetricsWindow, name: str) -> EngineMinute:
    """Return the last minute of one engine, its data-parallel ranks together."""
    by_vllm = _sum([window.increase(name, metric) for metric in FAILED_TRANSFERS])
    pulls = window.increase(name, "pdserve_patch_effects_total", patch="mooncake-pulls", effect="pulls-failed")
    # The same pulls. Before vllm 0.33 vLLM leaves some out, and without its patch it exports none.
    failed = max((count for count in (by_vllm, pulls) if count is not None), default=None)
    return EngineMinute(
        computed=window.rate(name, _BY_SOURCE, source="local_compute"),
        received=window.rate(name, _BY_SOURCE, source="external_kv_transfer"),
        generated=window.rate(name, "vllm:generation_tokens_total"),
        prefix_hit_rate=_share(window, name, "vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"),
        external_hit_rate=_share(
            window, name, "vllm:external_prefix_cache_hits_total", "vllm:external_prefix_cache_queries_total"
        ),
        preemptions=window.increase(name, "vllm:num_preemptions_total"),
        failed_transfers=failed,
    )


def cache_minute(window: MetricsWindow, name: str) -> CacheMinute:
    """Return the last minute of one LMCache server, all salts together."""
    return CacheMinute(
        hit_rate=_share(window, name, "lmcache_mp_lookup_hit_tokens_total", "lmcache_mp_lookup_requested_tokens_total"),
        stored=window.rate(name, "lmcache_mp_l1_write_chunks_total"),
        read=window.rate(name, "lmcache_mp_l1_read_chunks_total"),
        evicted=window.rate(name, "lmcache_mp_l1_evicted_chunks_total"),
    )


def _latency(window: MetricsWindow, processes: Sequence[str], name: str) -> Latency | None:
    seen = window.distribution(processes, name)
    if seen is None:
        return None
    p50, p90, p99 = (seen.quantile(share) for share in (0.5, 0.9, 0.99))
    return Latency(round(seen.count), p50, p90, p99, seen.largest_bound)


def _share(window: MetricsWindow, name: str, part: str, whole: str) -> float | None:
    hits, asked = window.increase(name, part), window.increase(name, whole)
    return hits / asked if hits is not None and asked else None


def _sum(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


_KEPT_EVENTS = 50


@dataclass(frozen=True)
class Frame:
    """Holds what one look has shown. Rates are of the last minute, or of what of it was seen."""

    view: StatusView
    traffic: MinuteTraffic
    engines: dict[str, EngineMinute]
    caches: dict[str, CacheMinute]
    waiting_at_proxy: int | None
    proxy_error: str | None
    """Why the proxy, which should answer, shows no figures."""
    events: tuple[dict[str, Any], ...]
    """The last ones of the run."""
    news: tuple[dict[str, Any], ...]
    """Those since the frame before; all that are kept in the first one."""

    def to_json(self) -> dict[str, Any]:
        """Return what `status --json` has, except for LMCache's /status, and the last minute."""
        minute = {
            "traffic": {**asdict(self.traffic), "waiting_at_proxy": self.waiting_at_proxy},
            "engines": {name: asdict(engine) for name, engine in self.engines.items()},
            "caches": {name: asdict(cache) for name, cache in self.caches.items()},
        }
        return {"at": round(time.time(), 3), **self.view.to_json(), "last_minute": minute, "events": list(self.news)}


class DeploymentWatch:
    """Looks at the current run of a deployment, and at the next one once an `up` has begun it."""

    def __init__(self, root: Path, name: str | None) -> None:
        """Begin to watch a deployment. Raises what `find` raises."""
        self._root = root
        self._begin(find(root, name))
        self._name = self._run.path.parent.name

    def _begin(self, run: RunDir) -> None:
        self._run, self._window, self._offset = run, MetricsWindow(), 0
        self._events: deque[dict[str, Any]] = deque(maxlen=_KEPT_EVENTS)

    def look(self) -> Frame:
        """Ask everything once, and return what it shows. Raises what `find` and `read_recorded` raise."""
        run = find(self._root, self._name)
        if run.path != self._run.path:
            self._begin(run)
        view = read_recorded(run)
        at = endpoints(view) if view.launcher_lives else Endpoints({}, {}, {}, None)
        pages = asyncio.run(self._pages(view, at))
        self._window.add(time.monotonic(), pages)
        proxy = pages.get("proxy")
        events, self._offset = run.read_events(self._offset)
        self._events.extend(events)
        return Frame(
            view=replace(
                view,
                engines={name: engine_figures(url, pages[name]) for name, url in at.engines.items()},
                caches={name: lmcache_figures(url, pages[name]) for name, url in at.caches.items()},
                stores={name: store_figures(url, pages[name]) for name, url in at.stores.items()},
            ),
            traffic=minute_traffic(self._window, _writers(view)),
            engines={name: engine_minute(self._window, name) for name in at.engines},
            caches={name: cache_minute(self._window, name) for name in at.caches},
            waiting_at_proxy=None if isinstance(proxy, str) else _waiting_count(proxy),
            proxy_error=proxy if isinstance(proxy, str) else None,
            events=tuple(self._events),
            news=tuple(events),
        )

    async def _pages(self, view: StatusView, at: Endpoints) -> dict[str, Page]:
        urls = {**at.engines, **at.caches, **at.stores} | ({} if at.proxy is None else {"proxy": at.proxy})
        async with endpoint_client(self._run, view) as everywhere:
            pages = await asyncio.gather(*(read_metrics(url, everywhere) for url in urls.values()))
        return dict(zip(urls, pages, strict=True))


def _writers(view: StatusView) -> list[str]:
    """Return the engines whose answers clients get."""
    return [process.name for process in view.plan.processes if process.role in ("decode", "aggregated")]


def _waiting_count(page: list[Sample] | None) -> int | None:
    """Return how many wait for a place in a pool, or for an engine."""
    if page is None:
        return None
    return (total(page, f"{PREFIX}queue_depth") or 0) + (total(page, f"{PREFIX}held_requests") or 0)
