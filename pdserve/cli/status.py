"""`pdserve status`: every process of a deployment, once or again and again (`--watch`)."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pdserve.cli.options import JsonOption, NameArgument
from pdserve.cli.output import Cell, VerbOutput
from pdserve.errors import ServeError
from pdserve.printable import printable, size_text

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

    from pdserve.observe.metrics import EngineSnapshot, LmcacheSnapshot, ProxySnapshot, StoreSnapshot
    from pdserve.observe.status import StatusView
    from pdserve.observe.watch import Frame, Latency
    from pdserve.plan.model import Exposure
    from pdserve.run.directory import Silence

verbs = typer.Typer()


@verbs.command()
def status(
    name: NameArgument = None,
    json_: JsonOption = False,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Go on until Ctrl-C, with what happened in the last minute.")
    ] = False,
    interval: Annotated[
        float | None,
        typer.Option("--interval", min=0.5, metavar="SECONDS", help="With --watch: every 2 s unless given."),
    ] = None,
) -> None:
    """Show the state of every process, and what the engines report. Exit 5 when degraded or failed.

    With --watch: on a terminal a table that is redrawn, otherwise plain lines, with --json a line of JSON each time.
    """
    if watch:
        run_watch(name, as_json=json_, interval=2.0 if interval is None else interval)
        return
    if interval is not None:
        raise typer.BadParameter("--interval belongs to --watch")
    from pdserve.observe.status import look
    from pdserve.run.directory import find, home

    view = look(find(home(os.environ), name))
    if json_:
        typer.echo(json.dumps(view.to_json(), indent=2))
    else:
        show_status(view)
    if not view.healthy:
        raise typer.Exit(ServeError.exit_code)


def show_status(view: StatusView) -> None:
    """Print the head, a row for each process, and the ports that are open without a key."""
    out = VerbOutput()
    for line in head(view):
        out.line(line)
    out.rows(_COLUMNS, (_row(view, name) for name in view.state.processes))
    for line in _open_ports(view):
        out.line(line, "dim")


_COLUMNS = ("process", "role", "node", "pid", "state", "uptime", "ports", "report")
STATE_STYLES = {
    "ready": "green",
    "done": "green",
    "dead": "bold red",
    "degraded": "yellow",
    "starting": "cyan",
    "draining": "yellow",
}


def head(view: StatusView) -> list[str]:
    """Return what is above the table."""
    state = view.state
    lines = [f"{state.name}: {view.phase}" + (f" ({state.note})" if state.note else "")]
    if state.change:
        lines.append(f"change: {state.change}" + ("" if state.change == "under way" else "; `pdserve up` goes on"))
    if view.silence is not None:
        lines[0] += f"; it was {state.phase} when its launcher was last heard"
        if view.silence.seconds is not None:
            lines[0] += f", {view.silence.seconds:.0f} s ago"
        lines.append(_silent_launcher(view, view.silence))
    elif state.endpoint and view.phase in ("ready", "degraded"):
        place = view.plan.proxy_place
        lines.append(f"endpoint: {state.endpoint}/v1{place}  model: {view.plan.served_name}")
    lines += [f"untested: {name} ran on no device here, and can corrupt KV (docs/limits.md)" for name in view.untested]
    lines.extend(_patches(view))
    lines.append(f"record: {view.run_dir}")
    lines.extend(_cgroups(view))
    lines += [f"node {name} is lost: {node.lost}" for name, node in state.nodes.items() if node.lost]
    return lines + [f"left behind: {line}" for line in view.left]


def _silent_launcher(view: StatusView, silence: Silence) -> str:
    from pdserve.run.directory import LIVES_SECONDS

    state = view.state
    launcher = f"launcher: PID {state.launcher.pid} on {state.host}"
    if silence.stopped:
        return (
            f"{launcher} stands still (SIGSTOP, Ctrl-Z or a debugger), and nothing watches the deployment; "
            f"kill -CONT {state.launcher.pid} lets it go on, pdserve down {state.name} ends it"
        )
    return (
        f"{launcher} was killed or stopped, or cannot write its record; for other machines, the deployment counts "
        f"as lost after {LIVES_SECONDS:.0f} s"
    )


def _cgroups(view: StatusView) -> Iterator[str]:
    """Tell whether the kernel knows all that a node's processes have started, or only their trees do."""
    if not (view.left or view.launcher_lives):
        return
    with_cgroup = [name for name, node in view.state.nodes.items() if node.cgroup is not None]
    if with_cgroup:
        yield f"cgroups: on {', '.join(with_cgroup)} each process has one of its own, and whatever is in it is stopped"
    for name, node in view.state.nodes.items():
        if node.no_cgroup:
            yield (
                f"no cgroups on {name} ({node.no_cgroup}): a daemon that leaves its session and empties its "
                "environment ends with the deployment, not with its process, and outlives a KILL of agent and guard"
            )


def _patches(view: StatusView) -> Iterator[str]:
    """Yield the patches of the plan, then what is out of the ordinary about them, then what they have done."""
    from pdserve.patches.record import merged_effects

    planned = sorted({patch for process in view.plan.processes for patch in process.patches})
    if planned:
        yield f"patches: {', '.join(planned)}"
    for name, reported in view.patches.items():
        for patch in sorted({patch for record in reported for patch in record.allowed_unknown}):
            yield f"patch applied to unknown upstream code, as the recipe allows: {patch} in {name}"
        for patch, why in sorted({item for record in reported for item in record.skipped.items()}):
            yield f"patch left out: {patch} in {name}: {why}"
        counted = [
            f"{patch}: {', '.join(f'{effect} {value:g}' for effect, value in sorted(effects.items()))}"
            for patch, effects in sorted(merged_effects(reported).items())
        ]
        if counted:
            yield f"patch effects of {name}: {'; '.join(counted)}"


def _row(view: StatusView, name: str) -> tuple[Cell, ...]:
    process = view.state.processes[name]
    uptime = view.uptime(name)
    return (
        name,
        process.role,
        process.node,
        str(process.id.pid) if process.id else "-",
        (process.phase, STATE_STYLES.get(process.phase, "")),
        "-" if uptime is None else duration(uptime),
        " ".join(f"{purpose}:{port}" for purpose, port in view.ports(name).items()),
        _report(view, name),
    )


def _report(view: StatusView, name: str) -> str:
    note = view.state.processes[name].note
    restarts = view.state.processes[name].restarts
    parts = [note] if note else []
    if name in view.engines:
        parts.append(_engine(view.engines[name]))
    if name in view.caches:
        parts.append(_cache(view.caches[name]))
    if name in view.stores:
        parts.append(_store(view.stores[name]))
    if view.proxy is not None and view.state.processes[name].role == "proxy":
        parts += _proxy(view.proxy)
    if restarts:
        parts.append(f"restarts {restarts}")
    return "; ".join(parts)


def _engine(engine: EngineSnapshot) -> str:
    if engine.error is not None:
        return engine.error
    store = engine.store
    pool = "" if store is None else f" pool stored {store.stored} loaded {store.loaded} failed {store.failed} keys"
    return (
        f"running {number(engine.running)} waiting {number(engine.waiting)} kv {percent(engine.kv_cache_usage)} "
        f"prefix hits {percent(engine.prefix_hit_rate)} external hits {percent(engine.external_hit_rate)} "
        f"received {number(engine.received_tokens)} tokens{pool}"
    )


def _cache(cache: LmcacheSnapshot) -> str:
    if cache.error is not None:
        return cache.error
    used = "?" if cache.bytes_used is None else size_text(cache.bytes_used)
    return f"workers {number(cache.workers)} objects {number(cache.objects)} stored {used}"


def _store(store: StoreSnapshot) -> str:
    if store.error is not None:
        return store.error
    sizes = ["?" if size is None else f"{size / 2**20:.1f}" for size in (store.bytes_used, store.bytes_total)]
    return f"clients {number(store.clients)} keys {number(store.keys)} used {sizes[0]} of {sizes[1]} MiB"


def _proxy(proxy: ProxySnapshot) -> Iterator[str]:
    if proxy.error is not None:
        yield proxy.error
    for role, count in proxy.held.items():
        yield f"{count} wait for {role}, the first for {proxy.held_seconds.get(role, 0.0):.0f} s"


def number(value: int | None) -> str:
    return "?" if value is None else str(value)


def percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f}%"


def duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{rest:02d}s"


def _open_ports(view: StatusView) -> list[str]:
    """Return what a running deployment leaves open; nothing of one that is over is."""
    exposed = view.plan.exposed if view.left or view.launcher_lives else ()
    return [f"open without key: {_address(exposure)} {exposure.process}: {exposure.what}" for exposure in exposed]


def _address(exposure: Exposure) -> str:
    from pdserve.plan.build import RANDOM_PORT

    if exposure.port == RANDOM_PORT:
        return f"{exposure.address} (port chosen at start)"
    return f"{exposure.address}:{exposure.port}" + (f"-{exposure.last_port}" if exposure.last_port else "")


_EVENTS = 8
"""So many events are shown below the tables."""
_NOTES = 6
_PHASE_STYLES = {True: "bold green", False: "bold yellow"}
_ENGINE_COLUMNS = ("process", "state", "up", "run", "wait", "KV", "hits", "ext.", "computed", "received", "written")
_CACHE_COLUMNS = ("cache", "state", "up", "in use", "hits", "stored", "read", "evicted")
_LEGEND = (
    "hits: own prefix cache; ext.: other engines and caches; computed, received: prompt tokens/s; written: answer "
    "tokens/s"
)


def run_watch(name: str | None, *, as_json: bool, interval: float) -> None:
    """Look again and again, until Ctrl-C, a TERM or a closed terminal."""
    from pdserve.observe.watch import DeploymentWatch
    from pdserve.run.directory import home

    watch = DeploymentWatch(home(os.environ), name)
    if sys.stdout.isatty() and not as_json:
        from rich.live import Live

        from pdserve.system.stop_signals import let_signals_interrupt

        let_signals_interrupt()
        with Live(render(watch.look()), auto_refresh=False, screen=True) as live:
            while True:
                time.sleep(interval)
                live.update(render(watch.look()), refresh=True)
    while True:
        frame = watch.look()
        typer.echo(json.dumps(frame.to_json()) if as_json else "\n".join([*plain(frame), ""]))
        sys.stdout.flush()
        time.sleep(interval)


def render(frame: Frame) -> Group:
    """Render a frame for a terminal. What needs a look comes first: where the terminal ends, the rest is not shown."""
    from rich.console import Group
    from rich.text import Text

    from pdserve.operations.progress import EVENT_STYLES

    first, *rest = map(printable, heading(frame.view))
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
    """Return a frame's lines for a pipe: a process a line, cells by tabs; of the events only the new ones."""
    lines = [*map(printable, heading(frame.view)), *traffic_lines(frame), "\t".join(_ENGINE_COLUMNS)]
    lines += ["\t".join(cells) for cells in engine_rows(frame).values()]
    if caches := cache_rows(frame):
        lines += ["\t".join(_CACHE_COLUMNS), *("\t".join(cells) for cells in caches.values())]
    return [*lines, *notes(frame), *(line for event in frame.news if (line := _event_line(event)) is not None)]


def heading(view: StatusView) -> list[str]:
    """Return the phase, and where clients ask or why the launcher is not heard: what stays the same all day is left
    out."""
    first, second, *_ = head(view)
    return [first, second] if second.startswith(("endpoint: ", "launcher: ")) else [first]


def traffic_lines(frame: Frame) -> Iterator[str]:
    """Yield what clients had; latencies on a line of their own."""
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
    """Return the rows of the engines, the proxy, and what else is neither a cache nor done."""
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
    """Return LMCache servers, and the pool of a Mooncake store by its master."""
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
    """Return what is out of the ordinary, and why."""
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
    """Return the table of processes; what is not ready comes first."""
    from rich.table import Table
    from rich.text import Text

    table = Table(*columns, box=None, header_style="bold", pad_edge=False)
    for name in sorted(rows, key=lambda name: frame.view.state.processes[name].phase == "ready"):
        table.add_row(*(Text(cell, style=STATE_STYLES.get(cell, "")) for cell in rows[name]))
    return table


def _event_line(event: dict[str, Any]) -> str | None:
    from pdserve.operations.progress import event_text

    text = event_text(event)
    return None if text is None else printable(f"{datetime.fromtimestamp(event['at']):%H:%M:%S} {text}")


def _rate(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.1f}/s" if 0 < value < 10 else f"{value:,.0f}/s"


def _latency(latency: Latency | None) -> str:
    """Show p50/p90/p99 in one unit. `>`: beyond the largest bound of the histogram."""
    if latency is None or not latency.count:
        return "-"
    values = [value or 0.0 for value in (latency.p50, latency.p90, latency.p99)]
    in_seconds = max(values) >= 1
    texts = [f"{value:.1f}" if in_seconds else f"{1000 * value:.0f}" for value in values]
    beyond = [">" if value >= latency.largest_bound else "" for value in values]
    return "/".join(mark + text for mark, text in zip(beyond, texts, strict=True)) + (" s" if in_seconds else " ms")
