"""Read what engines, the proxy and caches report: the numbers behind `pdserve status` and `pdserve verify`.

A process that does not answer, or answers something else, is a snapshot with that reason, never an exception: `status`
has to show it. Names of metrics are those of vLLM 0.32.0, lmcache 0.5.6, mooncake 0.3.13 and of our proxy.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

import httpx
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from pdserve.health import unverified_tls
from pdserve.lmcache_server import parts_of_a_chunk, registered_workers
from pdserve.pd.telemetry.metrics_page import PREFIX

_TIMEOUT_SECONDS = 3.0
VERIFY_SALT = "pdserve-verify-"
"""With which every `cache_salt` of `pdserve verify` begins."""
_STORE = "vllm:mooncake_store_operation"
FAILED_TRANSFERS = (
    "vllm:nixl_num_failed_transfers_total",
    "vllm:mooncake_num_failed_transfers_total",
    "vllm:mooncake_num_failed_recvs_total",
)
_L1 = "lmcache_mp_l1"
_TOKENS = "vllm:prompt_tokens_by_source_total"
_SOURCES = ("local_compute", "local_cache_hit", "external_kv_transfer")

Page = list[Sample] | str
"""The samples of a /metrics, or why there are none."""


@dataclass(frozen=True)
class StoreUse:
    """The use of a Mooncake store by an engine, in keys: a KV block of one worker and one KV group each."""

    stored: int
    failed: int
    """Not stored, or not loaded."""
    loaded: int


@dataclass(frozen=True)
class EngineSnapshot:
    """One vLLM instance, its data-parallel ranks summed. None: the engine does not report it (statistics are off
    with --disable-log-stats, other versions have other names)."""

    url: str
    error: str | None = None
    """Why there is nothing to show."""
    running: int | None = None
    waiting: int | None = None
    kv_cache_usage: float | None = None
    """0 to 1, of the fullest data-parallel rank. Stale while the engine is idle: it is set by engine steps."""
    prefix_queries: int | None = None
    prefix_hits: int | None = None
    external_queries: int | None = None
    external_hits: int | None = None
    """Tokens that a KV connector can load from another engine or from LMCache."""
    prompt_tokens: dict[str, int] | None = None
    """By source: local_compute, local_cache_hit, external_kv_transfer."""
    block_size: int | None = None
    """Tokens of a KV block."""
    store: StoreUse | None = None
    """None: it has no Mooncake store, or has not used it yet."""
    preemptions: int | None = None
    """Requests that lost their KV blocks to others, and were computed again."""
    failed_transfers: int | None = None
    """Of KV, as NIXL and Mooncake count them (before vllm 0.33 with the patch mooncake-prom-metrics); None: this
    connector does not."""

    @property
    def reachable(self) -> bool:
        return self.error is None

    @property
    def prefix_hit_rate(self) -> float | None:
        return _rate(self.prefix_hits, self.prefix_queries)

    @property
    def external_hit_rate(self) -> float | None:
        return _rate(self.external_hits, self.external_queries)

    @property
    def received_tokens(self) -> int | None:
        """Return the prompt tokens whose KV was transferred to this engine instead of being computed by it."""
        return None if self.prompt_tokens is None else self.prompt_tokens.get("external_kv_transfer", 0)

    @property
    def unfinished(self) -> int | None:
        if self.running is None or self.waiting is None:
            return None
        return self.running + self.waiting


@dataclass(frozen=True)
class LmcacheSnapshot:
    """Holds the figures of one LMCache server."""

    url: str
    error: str | None = None
    healthy: bool | None = None
    workers: int | None = None
    """Engine workers registered, in whichever transfer mode."""
    objects: int | None = None
    """Chunks kept, counted once for every worker that stores its part."""
    bytes_used: int | None = None
    bytes_total: int | None = None
    read_locked: int | None = None
    """Chunks that loads hold, so that they are not evicted."""
    parts: int | None = None
    """Objects that it keeps of a chunk, at least: one for each rank with KV of its own. None: it does not say."""
    requested_tokens: int | None = None
    hit_tokens: int | None = None
    """The hits among the tokens that engines looked up."""
    evicted_chunks: int | None = None
    salts: int | None = None
    """The number of salts of which chunks were stored, without `pdserve verify`'s; None: its metrics carry none."""

    @property
    def reachable(self) -> bool:
        return self.error is None

    @property
    def hit_rate(self) -> float | None:
        return _rate(self.hit_tokens, self.requested_tokens)


@dataclass(frozen=True)
class SaltUse:
    """The work of an LMCache server for requests of one `cache_salt`: its counters carry the salt as a label, so these
    numbers are one request's own whatever else the server does meanwhile."""

    chunks_written: int
    chunks_read: int


def view_client(mounts: Mapping[str, httpx.AsyncBaseTransport] | None = None) -> httpx.AsyncClient:
    """Return a client for snapshots: short timeouts, and never through a proxy of the environment."""
    return httpx.AsyncClient(trust_env=False, verify=unverified_tls(), timeout=_TIMEOUT_SECONDS, mounts=mounts)


async def engine_snapshot(url: str, client: httpx.AsyncClient) -> EngineSnapshot:
    """Read the figures of an engine. `url` is http://host:port. /metrics needs no key."""
    return engine_figures(url, await read_metrics(url, client))


def engine_figures(url: str, samples: Page) -> EngineSnapshot:
    """Read the figures of an engine from its /metrics."""
    if isinstance(samples, str):
        return EngineSnapshot(url, error=samples)
    return EngineSnapshot(
        url=url,
        running=total(samples, "vllm:num_requests_running"),
        waiting=total(samples, "vllm:num_requests_waiting"),
        kv_cache_usage=_fold(samples, "vllm:kv_cache_usage_perc", max),
        prefix_queries=total(samples, "vllm:prefix_cache_queries_total"),
        prefix_hits=total(samples, "vllm:prefix_cache_hits_total"),
        external_queries=total(samples, "vllm:external_prefix_cache_queries_total"),
        external_hits=total(samples, "vllm:external_prefix_cache_hits_total"),
        prompt_tokens=_by_source(samples),
        block_size=_block_size(samples),
        store=_store_use(samples),
        preemptions=total(samples, "vllm:num_preemptions_total"),
        failed_transfers=_sum_of(samples, FAILED_TRANSFERS),
    )


def _by_source(samples: list[Sample]) -> dict[str, int] | None:
    if total(samples, _TOKENS) is None:
        return None
    return {name: total((s for s in samples if s.labels.get("source") == name), _TOKENS) or 0 for name in _SOURCES}


def _sum_of(samples: list[Sample], names: Iterable[str]) -> int | None:
    """Return the sum of these metrics; None: none of them is there."""
    counts = [count for name in names if (count := total(samples, name)) is not None]
    return sum(counts) if counts else None


def _block_size(samples: Iterable[Sample]) -> int | None:
    sizes = [sample.labels.get("block_size", "") for sample in samples if sample.name == "vllm:cache_config_info"]
    return int(sizes[0]) if sizes and sizes[0].isdecimal() else None


def _store_use(samples: Iterable[Sample]) -> StoreUse | None:
    keys = [sample for sample in samples if sample.name == f"{_STORE}_keys_total"]
    if not keys:
        return None
    failures = [sample for sample in samples if sample.name == f"{_STORE}_failed_keys_total"]

    def count(of: Iterable[Sample], operation: str) -> int:
        return sum(int(s.value) for s in of if s.labels.get("operation") == operation and math.isfinite(s.value))

    not_stored, not_loaded = count(failures, "save_put"), count(failures, "load_get")
    return StoreUse(
        stored=count(keys, "save_put") - not_stored,
        failed=not_stored + not_loaded,
        loaded=count(keys, "load_get") - not_loaded,
    )


async def lmcache_snapshot(http_url: str, client: httpx.AsyncClient) -> LmcacheSnapshot:
    """Read /status and /metrics of one server. Each /status makes the server check its allocator and log four lines."""
    try:
        response = await client.get(f"{http_url}/status", timeout=_TIMEOUT_SECONDS)
        response.raise_for_status()
        status = response.json()
        l1 = status["storage_manager"]["l1_manager"]
        snapshot = LmcacheSnapshot(
            url=http_url,
            healthy=bool(status["is_healthy"]),
            workers=registered_workers(status),
            objects=int(l1["total_object_count"]),
            bytes_used=int(l1["memory_used_bytes"]),
            bytes_total=int(l1["memory_total_bytes"]),
            parts=parts_of_a_chunk(status),
            read_locked=locked if isinstance(locked := l1.get("read_locked_count"), int) else None,
        )
    except (httpx.HTTPError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        return LmcacheSnapshot(http_url, error=_error_text(error))
    samples = await read_metrics(http_url, client)
    return snapshot if isinstance(samples, str) else _with_lookups(snapshot, samples)


def lmcache_figures(http_url: str, samples: Page) -> LmcacheSnapshot:
    """Read the figures of a server from its /metrics alone: each /status makes it check its allocator and log four
    lines, which is too much for who asks every two seconds."""
    if isinstance(samples, str):
        return LmcacheSnapshot(http_url, error=samples)
    used, ratio = total(samples, f"{_L1}_memory_usage_bytes"), _fold(samples, f"{_L1}_usage_ratio", max)
    size = round(used / ratio) if used and ratio else None
    return _with_lookups(LmcacheSnapshot(http_url, bytes_used=used, bytes_total=size), samples)


def _with_lookups(snapshot: LmcacheSnapshot, samples: Iterable[Sample]) -> LmcacheSnapshot:
    return replace(
        snapshot,
        requested_tokens=total(samples, "lmcache_mp_lookup_requested_tokens_total"),
        hit_tokens=total(samples, "lmcache_mp_lookup_hit_tokens_total"),
        evicted_chunks=total(samples, "lmcache_mp_l1_evicted_chunks_total"),
        salts=_salts(samples),
    )


def _salts(samples: Iterable[Sample]) -> int | None:
    stored = [sample for sample in samples if sample.name == "lmcache_mp_l1_write_chunks_total"]
    salts = {sample.labels["cache_salt"] for sample in stored if "cache_salt" in sample.labels and sample.value}
    return len([salt for salt in salts if not salt.startswith(VERIFY_SALT)]) if salts else None


async def lmcache_salt_use(http_url: str, salts: Collection[str], client: httpx.AsyncClient) -> SaltUse | None:
    """Return the use of these salts together. None: the server cannot be asked, or its metrics are off or carry no
    salts (yet)."""
    samples = await read_metrics(http_url, client)
    if isinstance(samples, str) or not any("cache_salt" in sample.labels for sample in samples):
        return None
    mine = [sample for sample in samples if sample.labels.get("cache_salt") in salts]
    return SaltUse(
        chunks_written=total(mine, "lmcache_mp_l1_write_chunks_total") or 0,
        chunks_read=total(mine, "lmcache_mp_l1_read_chunks_total") or 0,
    )


async def read_metrics(url: str, client: httpx.AsyncClient) -> Page:
    """Return the samples of /metrics, or why there are none."""
    try:
        response = await client.get(f"{url}/metrics", timeout=_TIMEOUT_SECONDS)
        response.raise_for_status()
        return await asyncio.to_thread(samples_of, response.text)
    except (httpx.HTTPError, ValueError) as error:
        return _error_text(error)


def samples_of(text: str) -> list[Sample]:
    """Parse the text of /metrics. Raises ValueError when it is something else."""
    try:
        return [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    except IndexError as error:  # of the parser, for example where a label has no name
        raise ValueError(f"no metrics: {error}") from error


def _error_text(error: Exception) -> str:
    if isinstance(error, httpx.TimeoutException):
        return f"no answer within {_TIMEOUT_SECONDS:g} s"
    if isinstance(error, httpx.HTTPStatusError):
        return f"HTTP {error.response.status_code}"
    if isinstance(error, httpx.ConnectError):
        return "not listening"
    if isinstance(error, httpx.HTTPError):
        return f"no answer: {str(error) or type(error).__name__}"
    return f"unreadable answer: {error}"


def total(samples: Iterable[Sample], name: str) -> int | None:
    """Return the sum of a metric's samples; None without any, or where one is no number."""
    value = _fold(samples, name, sum)
    return None if value is None else int(value)


def _fold(samples: Iterable[Sample], name: str, fold: Callable[[list[float]], float]) -> float | None:
    """Fold the samples of a metric; None: there are none, or one is NaN or infinite."""
    values = [sample.value for sample in samples if sample.name == name]
    return fold(values) if values and all(map(math.isfinite, values)) else None


def _rate(part: int | None, whole: int | None) -> float | None:
    return None if part is None or not whole else part / whole


@dataclass(frozen=True)
class ProxySnapshot:
    """The proxy's figures since it was started, all of its processes summed."""

    url: str
    error: str | None = None
    """Why there is nothing to show."""
    rejected: dict[str, int] = field(default_factory=dict)
    """Requests that a pool was too busy for (429), by pool."""
    not_ready: tuple[str, ...] = ()
    """Workers that get no requests."""
    held: dict[str, int] = field(default_factory=dict)
    """Requests that wait because no engine of a role is ready, by role; none where there are none."""
    held_seconds: dict[str, float] = field(default_factory=dict)
    """How long the first of them has waited."""


async def proxy_snapshot(url: str, client: httpx.AsyncClient) -> ProxySnapshot:
    """Read the figures of the proxy. `url` is its http(s)://host:port."""
    samples = await read_metrics(url, client)
    if isinstance(samples, str):
        return ProxySnapshot(url, error=samples)
    rejected: dict[str, int] = {}
    not_ready = []
    held: dict[str, int] = {}
    held_seconds: dict[str, float] = {}
    for sample in samples:
        pool, role = sample.labels.get("pool", ""), sample.labels.get("role", "")
        if sample.name == f"{PREFIX}admission_rejections_total" and math.isfinite(sample.value):
            rejected[pool] = rejected.get(pool, 0) + int(sample.value)
        elif sample.name == f"{PREFIX}worker_ready" and not sample.value:
            not_ready.append(sample.labels.get("worker", ""))
        elif sample.name == f"{PREFIX}held_requests" and sample.value:
            held[role] = int(sample.value)
        elif sample.name == f"{PREFIX}held_oldest_seconds" and sample.value:
            held_seconds[role] = round(sample.value, 1)
    return ProxySnapshot(url, rejected=rejected, not_ready=tuple(not_ready), held=held, held_seconds=held_seconds)


@dataclass(frozen=True)
class StoreSnapshot:
    """The pool as its master knows it. None: not reported."""

    url: str
    error: str | None = None
    """Why there is nothing to show."""
    clients: int | None = None
    """Engine workers that gave memory to the pool."""
    keys: int | None = None
    bytes_used: int | None = None
    bytes_total: int | None = None


async def store_snapshot(url: str, client: httpx.AsyncClient) -> StoreSnapshot:
    """Read the figures of a store. `url` is http://host:port of the master's HTTP side."""
    return store_figures(url, await read_metrics(url, client))


def store_figures(url: str, samples: Page) -> StoreSnapshot:
    """Read the figures of a master from its /metrics."""
    if isinstance(samples, str):
        return StoreSnapshot(url, error=samples)
    return StoreSnapshot(
        url,
        clients=total(samples, "master_active_clients"),
        keys=total(samples, "master_key_count"),
        bytes_used=total(samples, "master_allocated_bytes"),
        bytes_total=total(samples, "master_total_capacity_bytes"),
    )
