"""Evidence of a healthy measurement, and of ones with a difference."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pdserve.bench.figures import RequestRecord
from pdserve.bench.snapshot import Clocks, Counts, CpuUse, DeploymentSnapshot
from pdserve.bench.validity import Evidence
from pdserve.bench.workload import Load, Workload
from pdserve.pd.config.proxy import ProxyConfig, WorkerConfig
from pdserve.plan.model import LmcacheServer, Plan
from pdserve.plan.node import Node
from pdserve.plan.process import Env, Process
from pdserve.recipe.model import Timeouts, Verify

INPUT, OUTPUT, REQUESTS = 1000, 10, 20
TOKENS = INPUT * REQUESTS


def record(**changes: Any) -> RequestRecord:
    values: dict[str, Any] = {
        "started": 100.0,
        "ok": True,
        "prompt_tokens": INPUT,
        "output_tokens": OUTPUT,
        "ttft": 0.1,
        "gaps": (0.01,) * (OUTPUT - 1),
        "e2e": 0.19,
    }
    return RequestRecord(**(values | changes))


def plan(
    *,
    mode: str = "disaggregated",
    lmcache: bool | tuple[LmcacheServer, ...] = True,
    conditional: int | None = None,
    **changes: Any,
) -> Plan:
    """`lmcache`: its servers, or whether there is one beside the first engine."""
    roles = ("prefill", "decode") if mode == "disaggregated" else ("aggregated",)
    first = roles[0]
    config = ProxyConfig.model_validate(
        {
            "host": "127.0.0.1",
            "port": 1,
            "served_name": "m",
            "protocol": "mooncake" if mode == "disaggregated" else "aggregated",
            "workers": [
                WorkerConfig.model_validate(
                    {
                        "name": f"{role}-0",
                        "role": role,
                        "url": f"http://127.0.0.1:{number}",
                        "bootstrap_url": "http://127.0.0.1:9" if role == "prefill" else None,
                    }
                )
                for number, role in enumerate(roles, start=2)
            ],
            "routing": {"conditional": None if conditional is None else {"min_prompt_tokens": conditional}},
        }
    )
    if isinstance(lmcache, bool):
        lmcache = (lmcache_server(engines=(f"{first}-0",)),) if lmcache else ()
    values: dict[str, Any] = {
        "name": "d",
        "mode": mode,
        "platform": "cpu",
        "served_name": "m",
        "model": "m",
        "model_path": None,
        "nodes": (Node(name="here"),),
        "processes": tuple(process(f"{role}-0", role) for role in roles),
        "lmcache": lmcache,
        "proxy": config,
        "canary_seconds": 1,
        "timeouts": Timeouts(),
        "verify": Verify(),
        "cache_reset_endpoint": True,
        "chunk_size": 256 if lmcache else None,
    }
    return Plan(**(values | changes))


def lmcache_server(**changes: Any) -> LmcacheServer:
    values: dict[str, Any] = {
        "process": "lmcache-0",
        "http_url": "http://127.0.0.1:8",
        "instance_id": "l",
        "expected_workers": 1,
        "l1_bytes": 1,
        "shm_name": None,
    }
    return LmcacheServer(**(values | changes))


def process(name: str, role: str, *connectors: str, **changes: Any) -> Process:
    values: dict[str, Any] = {
        "name": name,
        "role": role,
        "node": "here",
        "argv": ("python3",),
        "env": Env(),
        "log": "log",
        "probe": None,
        "start_stage": 0,
        "stop_stage": 0,
        "ready_seconds": 1,
        "stop_seconds": 1,
        "patches": ("mooncake-pulls",),
        "connectors": [{"class_name": name} for name in connectors],
    }
    return Process.model_validate(values | changes)


def with_connector(class_name: str) -> Plan:
    """Mode aggregated with another cache tier instead of LMCache."""
    return plan(mode="aggregated", lmcache=False, processes=(process("aggregated-0", "aggregated", class_name),))


def reading(at: float, engines: Mapping[str, Mapping[str, float]], **changes: Any) -> DeploymentSnapshot:
    values: dict[str, Any] = {
        "clocks": Clocks(wall=at, monotonic=at),
        "run_id": "run-1",
        "phase": "ready",
        "plan": "digest",
        "lives": {"prefill-0": "1", "decode-0": "2", "proxy": "3"},
        "engines": {name: Counts(values=values) for name, values in engines.items()},
        "caches": {"lmcache-0": Counts(values={"written": 5.0 if at < 50 else 65.0})},
        "proxy": Counts(values={"requests": 7.0 if at < 50 else 7.0 + REQUESTS, "failovers": 2.0}),
    }
    return DeploymentSnapshot(**(values | changes))


def healthy(**changes: Any) -> Evidence:
    """All prompts computed on prefill and received by decode, all answers of the right length."""
    before = {
        "prefill-0": {"computed": 11.0, "local_hits": 6.0, "generated": 9.0},
        "decode-0": {"computed": 3.0, "received": 5.0, "generated": 9.0},
    }
    after = {
        "prefill-0": {"computed": 11.0 + TOKENS, "local_hits": 6.0, "generated": 9.0 + REQUESTS},
        "decode-0": {"computed": 3.0, "received": 5.0 + TOKENS, "generated": 9.0 + REQUESTS * OUTPUT},
    }
    evidence = Evidence(
        plan=plan(),
        workload=Workload(input_tokens=INPUT, output_tokens=OUTPUT),
        load=Load(requests=REQUESTS, concurrency=4),
        records=tuple(record(started=100.0 + number) for number in range(REQUESTS)),
        before=reading(0.0, before),
        after=reading(100.0, after),
        run_id="run-1",
        plan_digest="digest",
        client=CpuUse(used=0.2, wanted=0.3),
    )
    return replace(evidence, **changes)


def counted(evidence: Evidence, process: str, **values: float) -> Evidence:
    """With other counters of a process at the end."""
    after = evidence.after
    old = {**after.engines, **after.caches, "proxy": after.proxy}[process]
    new = Counts(values={**old.values, **values})
    field = "engines" if process in after.engines else "caches"
    update: dict[str, Any] = {"proxy": new} if process == "proxy" else {field: {**getattr(after, field), process: new}}
    return replace(evidence, after=after.model_copy(update=update))
