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


async def proxy_snapshot(url: str, client: httpx.AsyncClient) -> ProxySnapshot:
    """`url` is http(s)://host:port of the proxy."""
    samples = await read_metrics(url, client)
    if isinstance(samples, str):
        return ProxySnapshot(url, error=samples)
    rejected: dict[str, int] = {}
    not_ready = []
    for sample in samples:
        pool = sample.labels.get("pool", "")
        if sample.name == f"{_PREFIX}admission_rejections_total" and math.isfinite(sample.value):
            rejected[pool] = rejected.get(pool, 0) + int(sample.value)
        elif sample.name == f"{_PREFIX}worker_ready" and not sample.value:
            not_ready.append(sample.labels.get("worker", ""))
    return ProxySnapshot(url, rejected=rejected, not_ready=tuple(not_ready))
