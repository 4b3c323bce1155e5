"""What the master of a Mooncake store reports, under the names of mooncake 0.3.13."""

from __future__ import annotations

from dataclasses import dataclass

import httpx

from pdserve.observe.engine_metrics import Page, read_metrics, total


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
    """`url` is http://host:port of the master's HTTP side."""
    return store_figures(url, await read_metrics(url, client))


def store_figures(url: str, samples: Page) -> StoreSnapshot:
    """From the /metrics of a master."""
    if isinstance(samples, str):
        return StoreSnapshot(url, error=samples)
    return StoreSnapshot(
        url,
        clients=total(samples, "master_active_clients"),
        keys=total(samples, "master_key_count"),
        bytes_used=total(samples, "master_allocated_bytes"),
        bytes_total=total(samples, "master_total_capacity_bytes"),
    )
