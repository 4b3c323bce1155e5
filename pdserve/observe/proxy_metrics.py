"""What the proxy reports of its refusals and workers, under its own names (pd/telemetry/metrics_page.py)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import httpx

from pdserve.observe.engine_metrics import read_metrics

_PREFIX = "pdserve_proxy_"


@dataclass(frozen=True)
class ProxySnapshot:
    """Since the proxy was started, all of its processes summed."""

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
    """`url` is http(s)://host:port of the proxy."""
    samples = await read_metrics(url, client)
    if isinstance(samples, str):
        return ProxySnapshot(url, error=samples)
    rejected: dict[str, int] = {}
    not_ready = []
    held: dict[str, int] = {}
    held_seconds: dict[str, float] = {}
    for sample in samples:
        pool, role = sample.labels.get("pool", ""), sample.labels.get("role", "")
        if sample.name == f"{_PREFIX}admission_rejections_total" and math.isfinite(sample.value):
            rejected[pool] = rejected.get(pool, 0) + int(sample.value)
        elif sample.name == f"{_PREFIX}worker_ready" and not sample.value:
            not_ready.append(sample.labels.get("worker", ""))
        elif sample.name == f"{_PREFIX}held_requests" and sample.value:
            held[role] = int(sample.value)
        elif sample.name == f"{_PREFIX}held_oldest_seconds" and sample.value:
            held_seconds[role] = round(sample.value, 1)
    return ProxySnapshot(url, rejected=rejected, not_ready=tuple(not_ready), held=held, held_seconds=held_seconds)
