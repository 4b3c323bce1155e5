"""Everything that `status` shows: the recorded state, what lives, what engines and cache report, what is open."""

from __future__ import annotations

import asyncio
import time
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import httpx

from pdserve.observe.metrics import (
    EngineSnapshot,
    LmcacheSnapshot,
    ProxySnapshot,
    StoreSnapshot,
    engine_snapshot,
    lmcache_snapshot,
    proxy_snapshot,
    store_snapshot,
)
from pdserve.observe.remote_http import client, loopback_of, seen_from_here
from pdserve.patches.record import PatchRecord, merged_effects
from pdserve.plan.model import Plan
from pdserve.plan.process import HttpProbe
from pdserve.recipe.connectors.registry import untested_connectors
from pdserve.run.directory import RunDir, Silence, has_living_launcher, measure_silence, phase_now
from pdserve.run.orphans import list_living
from pdserve.run.patch_proof import records
from pdserve.run.state import DeploymentState
from pdserve.system.host import is_here

_TAKEN_SECONDS = 2.0
"""Who asks for the status does not wait for a launcher that is not there."""


@dataclass(frozen=True)
class StatusView:
    """One look at one deployment."""

    state: DeploymentState
    plan: Plan
    phase: str
    run_dir: str
    left: list[str]
    """Recorded processes that live although the launcher is gone."""
    engines: dict[str, EngineSnapshot] = field(default_factory=dict)
    caches: dict[str, LmcacheSnapshot] = field(default_factory=dict)
    stores: dict[str, StoreSnapshot] = field(default_factory=dict)
    proxy: ProxySnapshot | None = None
    launcher_lives: bool = False
    patches: dict[str, list[PatchRecord]] = field(default_factory=dict)
    """Engine -> what its processes report of their patches."""
    silence: Silence | None = None
    """The silence of a launcher that lives and is not heard: what is recorded may be over."""

    @property
    def healthy(self) -> bool:
        return self.phase == "ready"

    def uptime(self, name: str) -> float | None:
        """Return the seconds since the process was started; None unless it lives."""
        process = self.state.processes[name]
        if process.started_at is None or process.phase in ("pending", "done", "dead", "stopped"):
            return None
        return time.time() - process.started_at

    def ports(self, name: str) -> dict[str, int]:
        """Return the ports that the plan pins; none for a process that it does not have: an `up` that replaces it
        writes its plan first, and a plan can be edited by hand."""
        return next((dict(process.ports) for process in self.plan.processes if process.name == name), {})

    @property
    def untested(self) -> tuple[str, ...]:
        """Return vLLM's names of connectors in use that ran on no device here."""
        return untested_connectors(
            connector.class_name for process in self.plan.processes for connector in process.connectors
        )

    def to_json(self) -> dict[str, Any]:
        """Return the document of `status --json`: stable keys, no secrets."""
        planned = {process.name: process for process in self.plan.processes}
        unheard = None if self.silence is None else self.silence.seconds
        return {
            "name": self.state.name,
            "run": self.run_dir,
            "phase": self.phase,
            "recorded_phase": self.state.phase,
            "note": self.state.note,
            "change": self.state.change,
            "endpoint": self.state.endpoint,
            "launcher_pid": self.state.launcher.pid,
            "launcher_unheard_seconds": None if unheard is None else round(unheard, 1),
            "launcher_stopped": self.silence is not None and self.silence.stopped,
            "untested_connectors": list(self.untested),
            "nodes": {name: node.model_dump() for name, node in self.state.nodes.items()},
            "processes": {
                name: {
                    **process.model_dump(exclude={"id"}),
                    "pid": process.id.pid if process.id else None,
                    "ports": self.ports(name),
                    "patches": list(planned[name].patches) if name in planned else [],
                    "patch_processes": [
                        record.model_dump(include={"pid", "process", "kind", "active", "allowed_unknown", "skipped"})
                        for record in self.patches.get(name, [])
                    ],
                    "patch_effects": merged_effects(self.patches.get(name, [])),
                    "uptime_seconds": self.uptime(name),
                    "engine": asdict(self.engines[name]) if name in self.engines else None,
                    "lmcache": asdict(self.caches[name]) if name in self.caches else None,
                    "mooncake_store": asdict(self.stores[name]) if name in self.stores else None,
                    "proxy": asdict(self.proxy) if process.role == "proxy" and self.proxy is not None else None,
                }
                for name, process in self.state.processes.items()
            },
            "open_without_key": [exposure.model_dump() for exposure in self.plan.exposed],
            "left_behind": self.left,
        }


def look(run: RunDir) -> StatusView:
    """Reads the run directory and asks the live endpoints; what does not answer has the reason in its row."""
    view = read_recorded(run)
    if not view.launcher_lives:
        return view
    reports = asyncio.run(_ask(run, view))
    return replace(view, engines=reports.engines, caches=reports.caches, stores=reports.stores, proxy=reports.proxy)


def read_recorded(run: RunDir) -> StatusView:
    """Return the view by the run directory and the PIDs of this machine alone; no endpoint is asked."""
    state, plan = run.read_state(), run.read_plan()
    alive = has_living_launcher(run, state)
    here = {name for name, node in state.nodes.items() if is_here(node.hostname, node.place)}
    phase = phase_now(run, state)
    if not alive:
        for process in state.processes.values():
            if process.phase != "done" and (process.node not in here or process.id is None or not process.id.alive()):
                process.phase = "stopped" if process.phase in ("stopped", "pending") else "dead"
        return StatusView(state, plan, phase, str(run.path), list_living(state, run))
    for process in state.processes.values():
        if process.node not in here or process.phase not in ("ready", "degraded"):
            continue
        if process.id is not None and not process.id.alive():
            process.phase = "dead"
            process.note = "its PID is gone; the launcher has not reported it"
            # What the launcher believes does not matter: it may be stopped, or have lost its agents.
            phase = "degraded" if phase == "ready" else phase
    patches = {process.name: records(run, process.name) for process in plan.processes if process.patches}
    return StatusView(
        state,
        plan,
        phase,
        str(run.path),
        [],
        launcher_lives=True,
        patches=patches,
        silence=measure_silence(run, state),
    )


@dataclass(frozen=True)
class _Reports:
    """The reports of the processes on themselves, by name."""

    engines: dict[str, EngineSnapshot]
    caches: dict[str, LmcacheSnapshot]
    stores: dict[str, StoreSnapshot]
    proxy: ProxySnapshot | None


@dataclass(frozen=True)
class Endpoints:
    """Process -> the URL of what it reports, as `endpoint_client` reaches it from here. Only of those that answer."""

    engines: dict[str, str]
    caches: dict[str, str]
    stores: dict[str, str]
    proxy: str | None
    """None: it does not answer, or is vllm-router, whose figures have other names."""


def endpoints(view: StatusView) -> Endpoints:
    """Return the endpoints of the processes that live and answer by the record."""
    state, plan = view.state, seen_from_here(view.plan, view.state)

    def answers(name: str) -> bool:
        return name in state.processes and state.processes[name].phase in ("ready", "degraded", "draining")

    return Endpoints(
        engines={
            process.name: f"http://{process.probe.host}:{process.probe.port}"
            for process in plan.processes
            if isinstance(process.probe, HttpProbe) and process.is_engine and answers(process.name)
        },
        caches={server.process: server.http_url for server in plan.lmcache if answers(server.process)},
        stores={
            process.name: loopback_of(process, process.ports["http"], state)
            for process in plan.processes
            if process.is_store_master and answers(process.name)
        },
        proxy=_proxy_url(plan, state) if plan.proxy_kind == "pdserve" and answers("proxy") else None,
    )


def endpoint_client(run: RunDir, view: StatusView) -> httpx.AsyncClient:
    """Return a client for the URLs of `endpoints`. It does not wait for a launcher that stands still."""
    return client(run, view.state, taken_within=_TAKEN_SECONDS if view.silence is None else 0.0)


def _proxy_url(plan: Plan, state: DeploymentState) -> str:
    proxy = plan.process("proxy")
    node = state.nodes.get(proxy.node)
    if not plan.proxy_on_loopback or node is None or is_here(node.hostname, node.place):
        return plan.proxy_url
    url = loopback_of(proxy, plan.proxy.port, state)
    return url if plan.proxy.tls is None else url.replace("http:", "https:", 1)


async def _ask(run: RunDir, view: StatusView) -> _Reports:
    at = endpoints(view)
    async with endpoint_client(run, view) as everywhere:
        seen, kept, pooled, proxy = await asyncio.gather(
            asyncio.gather(*(engine_snapshot(url, everywhere) for url in at.engines.values())),
            asyncio.gather(*(lmcache_snapshot(url, everywhere) for url in at.caches.values())),
            asyncio.gather(*(store_snapshot(url, everywhere) for url in at.stores.values())),
            asyncio.gather(*(proxy_snapshot(url, everywhere) for url in [at.proxy] if url is not None)),
        )
    return _Reports(
        dict(zip(at.engines, seen, strict=True)),
        dict(zip(at.caches, kept, strict=True)),
        dict(zip(at.stores, pooled, strict=True)),
        proxy[0] if proxy else None,
    )
