"""`pdserve status --watch`: load, KV use, hit rates, latencies, transfers and events, again and again."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any

import typer
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from pdserve.cli.console import EVENT_STYLES, event_text
from pdserve.cli.observe.status import STATE_STYLES, duration, head, number, percent
from pdserve.observe.status import StatusView
from pdserve.observe.watch import DeploymentWatch, Frame, Latency
from pdserve.printable import printable
from pdserve.run.directory import home
from pdserve.system.stop_signals import held_back, interruptible

_EVENTS = 8
"""Shown below the tables."""
_NOTES = 6
_PHASE_STYLES = {True: "bold green", False: "bold yellow"}
_ENGINE_COLUMNS = ("process", "state", "up", "run", "wait", "KV", "hits", "ext.", "computed", "received", "written")
_CACHE_COLUMNS = ("cache", "state", "up", "in use", "hits", "stored", "read", "evicted")
_LEGEND = (
    "hits: own prefix cache; ext.: other engines and caches; computed, received: prompt tokens/s; written: answer "
    "tokens/s"
)


def run(name: str | None, *, as_json: bool, interval: float) -> None:
    """Ends with Ctrl-C, a TERM or a closed terminal, or with the error that ends the deployment's record."""
    watch = DeploymentWatch(home(os.environ), name)
    if sys.stdout.isatty() and not as_json:
        interruptible()
        live = Live(render(watch.look()), auto_refresh=False, screen=True)
        try:  # not `with`: a screen that is half taken is not given back
            with held_back(), contextlib.suppress(OSError):  # a terminal that is closed takes nothing
                live.start(refresh=True)
            while sys.stdout.isatty():
                time.sleep(interval)
                shown = render(watch.look())
                with contextlib.suppress(OSError):
                    live.update(shown, refresh=True)
            raise KeyboardInterrupt  # closed, and no HUP came: it was not the terminal of this session
        finally:
            with contextlib.suppress(OSError):
                live.stop()
    while True:
        frame = watch.look()
        typer.echo(json.dumps(frame.to_json()) if as_json else "\n".join([*plain(frame), ""]))
        sys.stdout.flush()
        time.sleep(interval)


def render(frame: Frame) -> Group:
    """For a terminal. What needs a look comes first: where the terminal ends, the rest is not shown."""
    first, *rest = heading(frame.view)
    parts: list[Text | Table] = [Text(f"{datetime.now():%H:%M:%S} {first}", style=_PHASE_STYLES[frame.view.healthy])]
    parts += [Text(line) for line in (*rest, *traffic_lines(frame))]
    parts += [Text(line, style="yellow") for line in notes(frame)]
    parts.append(Text(""))
    parts += [_table(frame, _ENGINE_COLUMNS, engine_rows(frame)), Text("")]
    if caches := cache_rows(frame):
        parts += [_table(frame, _CACHE_COLUMNS, caches), Text("")]
    for event in frame.events[-_EVENTS:]:
        if (line := _event_line(event)) is not None:
            parts.append(Text(line, style=EVENT_STYLES.get(event["event"], "")))
    return Group(*parts, Text(_LEGEND, style="dim"))


def plain(frame: Frame) -> list[str]:
    """For pipes: the same, a process a line, cells by tabs; of the events only the new ones."""
    lines = [*heading(frame.view), *traffic_lines(frame), "\t".join(_ENGINE_COLUMNS)]
    lines += ["\t".join(cells) for cells in engine_rows(frame).values()]
    if caches := cache_rows(frame):
        lines += ["\t".join(_CACHE_COLUMNS), *("\t".join(cells) for cells in caches.values())]
    return [*lines, *notes(frame), *(line for event in frame.news if (line := _event_line(event)) is not None)]


def heading(view: StatusView) -> list[str]:
    """The phase, and where clients ask or why the launcher is not heard: what stays the same all day is left out."""
    first, second, *_ = head(view)
    return [first, second] if second.startswith(("endpoint: ", "launcher: ")) else [first]


def traffic_lines(frame: Frame) -> Iterator[str]:
    """What clients had; latencies on a line of their own."""
    traffic = frame.traffic
    if not traffic.seconds:
        yield "clients: no figures yet"
        return
    yield (
        f"last {traffic.seconds:.0f} s ({traffic.measured_by}): requests {_rate(traffic.requests)}  errors "
        f"{_rate(traffic.errors)}  429 {_rate(traffic.refused)}  second attempts {_rate(traffic.failovers)}  "
        f"waiting {number(frame.waiting_at_proxy)}"
    )
    yield f"tokens (engines): prompt {_rate(traffic.prompt_tokens)}  answer {_rate(traffic.output_tokens)}"
    shown = {"TTFT": traffic.ttft, "ITL": traffic.itl, "KV transfer, at most": traffic.kv_transfer}
    yield "p50/p90/p99: " + "  ".join(f"{name} {_latency(value)}" for name, value in shown.items())


Rows = dict[str, tuple[str, ...]]
"""Process -> its cells."""
_CACHES = ("lmcache", "mooncake-master")


def engine_rows(frame: Frame) -> Rows:
    """Engines, the proxy, and what else is neither a cache nor done."""
    rows: Rows = {}
    for name, process in frame.view.state.processes.items():
        if process.role in _CACHES or process.phase == "done":
            continue
        engine, minute = frame.view.engines.get(name), frame.engines.get(name)
        figures: tuple[str, ...] = ("",) * 8
        if engine is not None and minute is not None:
            figures = (
                number(engine.running),
                number(engine.waiting),
                percent(engine.kv_cache_usage),
                percent(minute.prefix_hit_rate),
                percent(minute.external_hit_rate),
                _rate(minute.computed),
                _rate(minute.received),
                _rate(minute.generated),
            )
        rows[name] = (*_place(frame, name), *figures)
    return rows


def cache_rows(frame: Frame) -> Rows:
    """LMCache servers, and the pool of a Mooncake store by its master."""
    rows: Rows = {}
    for name, process in frame.view.state.processes.items():
        if process.role not in _CACHES:
            continue
        cache, minute = frame.view.caches.get(name) or frame.view.stores.get(name), frame.caches.get(name)
        used = None if cache is None or not cache.bytes_total else (cache.bytes_used or 0) / cache.bytes_total
        rates = ("-",) * 4
        if minute is not None:
            rates = (percent(minute.hit_rate), _rate(minute.stored), _rate(minute.read), _rate(minute.evicted))
        rows[name] = (*_place(frame, name), percent(used), *rates)
    return rows


def _place(frame: Frame, name: str) -> tuple[str, str, str]:
    process, uptime = frame.view.state.processes[name], frame.view.uptime(name)
    where = f"{name}@{process.node}" if len(frame.view.state.nodes) > 1 else name
    return where, process.phase, "-" if uptime is None else duration(uptime)


def notes(frame: Frame) -> list[str]:
    """What is out of the ordinary, and why."""
    view = frame.view
    lines = [f"left behind: {line}" for line in view.left]
    lines += [f"node {name} is lost: {node.lost}" for name, node in view.state.nodes.items() if node.lost]
    lines += [f"{name}: {process.note}" for name, process in view.state.processes.items() if process.note]
    errors = [("proxy", frame.proxy_error)]
    errors += [(name, report.error) for name, report in view.engines.items()]
    errors += [(name, report.error) for name, report in view.caches.items()]
    errors += [(name, report.error) for name, report in view.stores.items()]
    lines += [f"{name}: {error}" for name, error in errors if error is not None]
    for name, minute in frame.engines.items():
        if minute.failed_transfers:
            lines.append(f"{name}: {minute.failed_transfers:.0f} failed KV transfers in the last minute")
        if minute.preemptions:
            lines.append(f"{name}: {minute.preemptions:.0f} preemptions in the last minute")
    lines = [printable(line) for line in lines]
    more = len(lines) - _NOTES
    return lines if more <= 0 else [*lines[:_NOTES], f"and {more} more: pdserve status {view.state.name}"]


def _table(frame: Frame, columns: Sequence[str], rows: Rows) -> Table:
    """What is not ready comes first."""
    table = Table(*columns, box=None, header_style="bold", pad_edge=False)
    for name in sorted(rows, key=lambda name: frame.view.state.processes[name].phase == "ready"):
        table.add_row(*(Text(cell, style=STATE_STYLES.get(cell, "")) for cell in rows[name]))
    return table


def _event_line(event: dict[str, Any]) -> str | None:
    text = event_text(event)
    return None if text is None else printable(f"{datetime.fromtimestamp(event['at']):%H:%M:%S} {text}")


def _rate(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.1f}/s" if 0 < value < 10 else f"{value:,.0f}/s"


def _latency(latency: Latency | None) -> str:
    """p50/p90/p99 in one unit. `>`: beyond the largest bound of the histogram."""
    if latency is None or not latency.count:
        return "-"
    values = [value or 0.0 for value in (latency.p50, latency.p90, latency.p99)]
    in_seconds = max(values) >= 1
    texts = [f"{value:.1f}" if in_seconds else f"{1000 * value:.0f}" for value in values]
    beyond = [">" if value >= latency.largest_bound else "" for value in values]
    return "/".join(mark + text for mark, text in zip(beyond, texts, strict=True)) + (" s" if in_seconds else " ms")
