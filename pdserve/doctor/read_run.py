"""Reads a run for the rules: its directory, and its processes where they live. Nothing is written or sent.

A record that cannot be read is an entry in `unread`, and hides no other record.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from pdserve.doctor.records import Failure, LiveFigures, ProcessLog, RunRecords
from pdserve.errors import NotOursError, PdserveError, RecipeError, StateError
from pdserve.logs.lines import end_of, plain_line, read_from, split
from pdserve.observe.metrics import ProxySnapshot, proxy_snapshot, view_client
from pdserve.observe.status import StatusView, look
from pdserve.plan.environment import ENGINE_KEY
from pdserve.plan.model import Plan
from pdserve.recipe.load import yaml12
from pdserve.run.directory import RunDir, find, has_living_launcher, phase_now
from pdserve.run.state import DeploymentState
from pdserve.system import cgroup
from pdserve.system.host import is_here
from pdserve.system.pressure import Pressure, cpu_seconds, largest_cpu_share, pressure_of, wanted_seconds
from pdserve.system.procfs import descendants

BEGINNING_BYTES, END_BYTES = 256 << 10, 8 << 20
"""What is read of a log. Between them stands what a long run has logged while nothing was new."""
_MEASURED_SECONDS = 1.0
"""For how long the CPU time of the proxy is watched."""
_SMALL_FILE = 4 << 20

RecordT = TypeVar("RecordT")


def find_run(target: str | None, root: Path) -> RunDir:
    """Return the run directory of that path, else the current run of the deployment of that name; None: of the only
    deployment. Raises StateError and NotOursError."""
    if target is None:
        return find(root, None)
    path = Path(target)
    if "/" not in target and not (path / "events.jsonl").exists():
        return find(root, target)
    if not path.is_dir():
        raise StateError(
            "there is no such run directory",
            where=target,
            todo="pdserve list shows every deployment and its run directory",
        )
    run = RunDir(path.resolve())
    if not any(file.exists() for file in (run.events, run.plan, run.state, run.failure)):
        raise StateError(
            "this folder is no run directory",
            where=target,
            cause="it has no events.jsonl, plan.json, state.json or failure.md",
            todo="pdserve list shows every deployment and its run directory",
        )
    return run


def read_run(run: RunDir) -> RunRecords:
    """Read everything about a run but its logs."""
    unread: list[str] = []
    state = _record(run.read_state, unread, run.state)
    plan = _record(run.read_plan, unread, run.plan)
    alive = state is not None and has_living_launcher(run, state)
    live = LiveFigures()
    if state is not None and plan is not None and alive:
        live = _live(run, state, plan, unread)
    events, _ = run.read_events()
    return RunRecords(
        run_dir=str(run.path),
        phase="" if state is None else phase_now(run, state),
        alive=alive,
        state=state,
        plan=plan,
        versions=run.read_versions(),
        recipe=_recipe(run),
        failure=_failure(run),
        events=tuple(events),
        live=live,
        unread=tuple(unread),
    )


def read_logs(run: RunDir, records: RunRecords) -> Iterator[ProcessLog]:
    """Yield one log at a time, the launcher's and the agents' too."""
    for file in sorted(run.logs.glob("*.log")):
        name = file.stem.partition("@")[0]
        yield ProcessLog(name, records.role(name), f"{run.logs.name}/{file.name}", tuple(map(plain_line, _lines(file))))


def known_secrets(run: RunDir, records: RunRecords, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the values that must not leave this machine: the engine key, the token of the run, what the plan takes
    from the environment."""
    secrets = [] if records.state is None else [records.state.token]
    with contextlib.suppress(StateError):
        secrets.append(run.read_key())
    secrets += [environ[name] for name in _secret_names(records) if name in environ]
    return tuple(secret for secret in secrets if secret)


def unset_secrets(records: RunRecords, environ: Mapping[str, str]) -> list[str]:
    """Return the variables of the plan's secrets that this shell does not have: their values cannot be recognised."""
    return [name for name in _secret_names(records) if not environ.get(name)]


def _secret_names(records: RunRecords) -> list[str]:
    """Return the variables of the shell of `up`; the engine key is none."""
    processes = records.plan.processes if records.plan else ()
    return sorted({name for process in processes for name in process.env.secrets.values()} - {ENGINE_KEY})


def _lines(file: Path) -> list[str]:
    with contextlib.suppress(OSError):
        size = file.stat().st_size
        if END_BYTES < size <= BEGINNING_BYTES + END_BYTES:
            return split(read_from(file, 0, size) or b"")
        if size > BEGINNING_BYTES + END_BYTES:
            # Half a line at a cut is no line.
            return split(read_from(file, 0, BEGINNING_BYTES) or b"")[:-1] + split(end_of(file, END_BYTES))[1:]
    # A log that was cut a moment ago is short: its end begins in the one before, and has all of it.
    end = end_of(file, END_BYTES)
    return split(end) if len(end) < END_BYTES else split(end)[1:]


def _record(read: Callable[[], RecordT], unread: list[str], file: Path) -> RecordT | None:
    """Read a record; None: it cannot be read. What was never written is no fault."""
    try:
        return read()
    except (StateError, NotOursError) as error:
        if file.exists() or file.is_symlink():
            unread.append(f"{file.name}: {error.what}" + (f" ({error.cause})" if error.cause else ""))
        return None


def _text(file: Path) -> str:
    return (read_from(file, 0, _SMALL_FILE) or b"").decode(errors="replace")


def _recipe(run: RunDir) -> Mapping[str, Any]:
    try:
        document = yaml12.parse(_text(run.recipe), run.recipe.name).data
    except RecipeError:
        return {}
    return document if isinstance(document, dict) else {}


def _failure(run: RunDir) -> Failure | None:
    """Return the head of failure.md, as launch/failure.py writes it."""
    head: dict[str, str] = {}
    for line in _text(run.failure).splitlines():
        if line.startswith("**") and line.endswith("**"):
            head.setdefault("what", line.strip("*"))
        for key, mark in (("cause", "- likely cause: "), ("todo", "- what to do: ")):
            if line.startswith(mark):
                head.setdefault(key, line.removeprefix(mark))
    return Failure(**head) if "what" in head else None


def _live(run: RunDir, state: DeploymentState, plan: Plan, unread: list[str]) -> LiveFigures:
    try:
        view = look(run)
    except PdserveError as error:
        unread.append(f"the live processes: {error.what}")
        return LiveFigures()
    pressure = _pressure(state)
    return LiveFigures(view.engines, view.caches, view.stores, _proxy(view, plan), pressure)


def _proxy(view: StatusView, plan: Plan) -> ProxySnapshot | None:
    """Read the proxy's figures; None: it does not run, or another program is in its place."""
    if plan.proxy_kind != "pdserve" or view.phase not in ("ready", "degraded"):
        return None

    async def ask() -> ProxySnapshot:
        async with view_client() as client:
            return await proxy_snapshot(plan.proxy_url, client)

    return asyncio.run(ask())


def _pressure(state: DeploymentState) -> dict[str, Pressure]:
    """Return the pressure on the processes that live on this machine."""
    here = {name for name, node in state.nodes.items() if is_here(node.hostname, node.place)}
    pids = {
        name: process.id.pid
        for name, process in state.processes.items()
        if process.node in here and process.id is not None and process.id.alive()
    }
    tops: dict[str, Path] = {}
    for controller in ("", "cpu"):
        with contextlib.suppress(OSError):
            _, tops[controller] = cgroup.place(controller)
    seen = {name: pressure_of(pid, tops.get(""), tops.get("cpu")) for name, pid in pids.items()}
    if "proxy" in pids:
        pid, began = pids["proxy"], time.monotonic()
        tree = (pid, *descendants(pid))
        used, wanted = cpu_seconds(pid), wanted_seconds(tree)
        time.sleep(_MEASURED_SECONDS)
        used_then, wanted_then, passed = cpu_seconds(pid), wanted_seconds(tree), time.monotonic() - began
        seen["proxy"] = replace(
            seen["proxy"],
            busiest_share=largest_cpu_share(used, used_then, passed),
            wanted_share=largest_cpu_share(wanted, wanted_then, passed),
        )
    return seen
