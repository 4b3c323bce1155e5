"""Which figures of a measurement are compared: those of the client, then our own of the same window. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from pdserve.bench.figures import PERCENTILES, Figures, Spread
from pdserve.bench.result import Measurement, Window

Group = Literal["latencies", "rates", "requests", "engines and caches", "CPU"]
Better = Literal["less", "more"]


@dataclass(frozen=True)
class ComparedFigure:
    """Of a measurement."""

    group: Group
    unit: str
    better: Better | None
    """None: a change of it is neither better nor worse by itself."""
    read: Callable[[Measurement], float | None]
    """None: it was not measured."""


def _latency(name: str, part: str) -> ComparedFigure:
    def read(measurement: Measurement) -> float | None:
        spread: Spread | None = getattr(measurement.figures, name)
        return None if spread is None else getattr(spread, part)

    return ComparedFigure("latencies", "ms", "less", read)


def _client(group: Group, unit: str, better: Better, read: Callable[[Figures], float | None]) -> ComparedFigure:
    return ComparedFigure(group, unit, better, lambda measurement: read(measurement.figures))


def _window(
    unit: str, better: Better | None, read: Callable[[Window], float | None], group: Group = "engines and caches"
) -> ComparedFigure:
    return ComparedFigure(group, unit, better, lambda measurement: read(measurement.window))


def _share(value: float | None) -> float | None:
    return None if value is None else 100 * value


def _preemptions(window: Window) -> float | None:
    counted = [role["preemptions"] for role in (window.prefill, window.decode) if "preemptions" in role]
    return sum(counted) if counted else None


FIGURES: Mapping[str, ComparedFigure] = {
    **{
        f"{title} {part}": _latency(name, part)
        for title, name in (("TTFT", "ttft"), ("ITL", "itl"), ("TPOT", "tpot"), ("E2E", "e2e"))
        for part in ("mean", *(f"p{percent}" for percent in PERCENTILES))
    },
    "requests": _client("rates", "requests/s", "more", lambda figures: figures.requests_per_second),
    "goodput": _client("rates", "requests/s", "more", lambda figures: figures.goodput),
    "output": _client("rates", "tokens/s", "more", lambda figures: figures.output_per_second),
    "total": _client("rates", "tokens/s", "more", lambda figures: figures.total_per_second),
    "output per GPU": _client("rates", "tokens/s", "more", lambda figures: figures.output_per_second_per_gpu),
    "total per GPU": _client("rates", "tokens/s", "more", lambda figures: figures.total_per_second_per_gpu),
    "1000/ITL p50": _client("rates", "tokens/s/user", "more", lambda figures: figures.interactivity_by_itl.get("p50")),
    "1000/mean TPOT": _client("rates", "tokens/s/user", "more", lambda figures: figures.interactivity_by_tpot),
    "answered": _client("requests", "requests", "more", lambda figures: float(figures.completed)),
    "failed": _client(
        "requests", "requests", "less", lambda figures: float(figures.requests - figures.completed - figures.cut)
    ),
    "cut": _client("requests", "requests", "less", lambda figures: float(figures.cut)),
    "prefix hit": _window("%", "more", lambda window: _share(window.prefix_hit)),
    "computed on prefill": _window("tokens", "less", lambda window: window.prefill.get("computed")),
    "loaded on prefill": _window("tokens", None, lambda window: window.prefill.get("received")),
    "LMCache had": _window("%", None, lambda window: _share(window.cache_hit)),
    "chunks stored": _window("chunks", None, lambda window: window.lmcache.get("written")),
    "chunks loaded": _window("chunks", None, lambda window: window.lmcache.get("read")),
    "chunks evicted": _window("chunks", "less", lambda window: window.lmcache.get("evicted")),
    "received by decode": _window("tokens", None, lambda window: window.decode.get("received")),
    "computed by decode": _window("tokens", "less", lambda window: window.decode.get("computed")),
    "KV moved": _window("MiB", None, lambda window: None if window.moved_bytes is None else window.moved_bytes / 2**20),
    "KV transfers": _window("s", "less", lambda window: window.moved_seconds),
    "preemptions": _window("requests", "less", _preemptions),
    "most running": _window("requests", None, lambda window: window.peaks.running),
    "most waiting": _window("requests", "less", lambda window: window.peaks.waiting),
    "fullest KV": _window("%", None, lambda window: _share(window.peaks.kv_usage)),
    "CPU of the client": _window("cores", "less", lambda window: window.client_cpu.used, "CPU"),
    "CPU of the proxy": _window("cores", "less", lambda window: window.proxy_cpu.used, "CPU"),
}
"""In the order in which they are shown."""
GROUPS: tuple[Group, ...] = tuple(dict.fromkeys(figure.group for figure in FIGURES.values()))
