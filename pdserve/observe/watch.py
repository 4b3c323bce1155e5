"""One look after the other at a deployment: what `status` shows, and what has happened since."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from prometheus_client.samples import Sample

from pdserve.observe.engine_metrics import Page, engine_figures, lmcache_figures, read_metrics, total
from pdserve.observe.last_minute import CacheMinute, EngineMinute, MinuteTraffic, cache_minute, engine_minute, traffic
from pdserve.observe.status import Endpoints, StatusView, endpoint_client, endpoints, recorded
from pdserve.observe.store_metrics import store_figures
from pdserve.observe.window import MetricsWindow
from pdserve.pd.telemetry.metrics_page import PREFIX
from pdserve.run.directory import RunDir, find

_KEPT_EVENTS = 50


@dataclass(frozen=True)
class Frame:
    """One look. Rates are of the last minute, or of what of it was seen."""

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
        """What `status --json` has, except for LMCache's /status, and the last minute."""
        minute = {
            "traffic": {**asdict(self.traffic), "waiting_at_proxy": self.waiting_at_proxy},
            "engines": {name: asdict(engine) for name, engine in self.engines.items()},
            "caches": {name: asdict(cache) for name, cache in self.caches.items()},
        }
        return {"at": round(time.time(), 3), **self.view.to_json(), "last_minute": minute, "events": list(self.news)}


class DeploymentWatch:
    """Looks at the current run of a deployment, and at the next one once an `up` has begun it."""

    def __init__(self, root: Path, name: str | None) -> None:
        """Raises what `find` raises."""
        self._root = root
        self._begin(find(root, name))
        self._name = self._run.path.parent.name

    def _begin(self, run: RunDir) -> None:
        self._run, self._window, self._offset = run, MetricsWindow(), 0
        self._events: deque[dict[str, Any]] = deque(maxlen=_KEPT_EVENTS)

    def look(self) -> Frame:
        """Asks everything once. Raises what `find` and `recorded` raise."""
        run = find(self._root, self._name)
        if run.path != self._run.path:
            self._begin(run)
        view = recorded(run)
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
            traffic=traffic(self._window, _writers(view)),
            engines={name: engine_minute(self._window, name) for name in at.engines},
            caches={name: cache_minute(self._window, name) for name in at.caches},
            waiting_at_proxy=None if isinstance(proxy, str) else _waiting(proxy),
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
    """The engines whose answers clients get."""
    return [process.name for process in view.plan.processes if process.role in ("decode", "aggregated")]


def _waiting(page: list[Sample] | None) -> int | None:
    """For a place in a pool, or for an engine."""
    if page is None:
        return None
    return (total(page, f"{PREFIX}queue_depth") or 0) + (total(page, f"{PREFIX}held_requests") or 0)
