"""`pdserve status`"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pdserve.errors import ServeError
from pdserve.observe.metrics import EngineSnapshot, LmcacheSnapshot, ProxySnapshot, StoreSnapshot
from pdserve.observe.status import StatusView, look
from pdserve.patches.record import merged_effects
from pdserve.plan.model import Exposure
from pdserve.plan.proxy.exposure import RANDOM_PORT
from pdserve.printable import printable, size_text
from pdserve.run.directory import LIVES_SECONDS, find, home
from pdserve.run.presence import Silence

_COLUMNS = ("process", "role", "node", "pid", "state", "uptime", "ports", "report")
STATE_STYLES = {
    "ready": "green",
    "done": "green",
    "dead": "bold red",
    "degraded": "yellow",
    "starting": "cyan",
    "draining": "yellow",
}


def run(name: str | None, *, as_json: bool) -> None:
    """Exit 0 only for a deployment that is ready; ServeError's code for every other one."""
    view = look(find(home(os.environ), name))
    _print(view, as_json=as_json)
    if not view.healthy:
        raise typer.Exit(ServeError.exit_code)


def _print(view: StatusView, *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(view.to_json(), indent=2))
    elif sys.stdout.isatty():
        Console().print(_render(view))
    else:
        _plain(view)


def head(view: StatusView) -> list[str]:
    """What is above the table, as a terminal may have it: reasons of others are in it."""
    return list(map(printable, _head(view)))


def _head(view: StatusView) -> list[str]:
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
    """Whether the kernel knows all that a node's processes have started, or only their trees do."""
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
    """The patches of the plan, then what is out of the ordinary about them, then what they have done."""
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


def _row(view: StatusView, name: str) -> tuple[str, ...]:
    """As a terminal may have it: progress and reasons are lines of logs."""
    process = view.state.processes[name]
    uptime = view.uptime(name)
    cells = (
        name,
        process.role,
        process.node,
        str(process.id.pid) if process.id else "-",
        process.phase,
        "-" if uptime is None else duration(uptime),
        " ".join(f"{purpose}:{port}" for purpose, port in view.ports(name).items()),
        _report(view, name),
    )
    return tuple(map(printable, cells))


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
    """What a running deployment leaves open; nothing of one that is over is."""
    exposed = view.plan.exposed if view.left or view.launcher_lives else ()
    lines = [f"open without key: {_address(exposure)} {exposure.process}: {exposure.what}" for exposure in exposed]
    return list(map(printable, lines))


def _address(exposure: Exposure) -> str:
    if exposure.port == RANDOM_PORT:
        return f"{exposure.address} (port chosen at start)"
    return f"{exposure.address}:{exposure.port}" + (f"-{exposure.last_port}" if exposure.last_port else "")


def _render(view: StatusView) -> Table:
    outer = Table.grid()
    for line in head(view):
        outer.add_row(Text(line))
    table = Table(*_COLUMNS, header_style="bold")
    for name in view.state.processes:
        row = _row(view, name)
        table.add_row(*(Text(cell, style=STATE_STYLES.get(cell, "")) for cell in row))
    outer.add_row(table)
    for line in _open_ports(view):
        outer.add_row(Text(line, style="dim"))
    return outer


def _plain(view: StatusView) -> None:
    """For pipes: one process a line, tab separated, then what is open."""
    for line in head(view):
        typer.echo(line)
    typer.echo("\t".join(_COLUMNS))
    for name in view.state.processes:
        typer.echo("\t".join(_row(view, name)))
    for line in _open_ports(view):
        typer.echo(line)
