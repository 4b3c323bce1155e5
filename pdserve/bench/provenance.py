"""Reads what a result has to name: versions, hardware, recipe, and what was planned."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Mapping
from pathlib import Path

from pdserve.bench.clients.client import LoadClient
from pdserve.bench.result import Provenance
from pdserve.plan.model import Plan
from pdserve.preflight.facts import own_pdserve
from pdserve.run.directory import RunDir
from pdserve.system.process import output_of

_TOOL_SECONDS = 30.0
_GPUS = (
    ("nvidia-smi", "--query-gpu=index,name,memory.total,driver_version", "--format=csv,noheader"),
    ("rocm-smi", "--showproductname", "--csv"),
)


def provenance(run: RunDir, plan: Plan, client: LoadClient, planned: Mapping[str, str]) -> Provenance:
    """What cannot be read is left out."""
    return Provenance(
        deployment=plan.name,
        run_id=run.run_id,
        began=time.time(),
        client=client.name,
        versions={**_versions(run.versions), **client.versions, "pdserve (client)": own_pdserve()},
        hardware=_hardware(plan),
        recipe=_text(run.recipe),
        planned=planned,
    )


def _versions(file: Path) -> dict[str, str | None]:
    try:
        recorded = json.loads(_text(file))
    except ValueError:
        return {}
    return {name: value for name, value in recorded.items() if value is None or isinstance(value, str)}


def _hardware(plan: Plan) -> dict[str, str]:
    facts = {
        "host": platform.node(),
        "cpu": _cpu(),
        "cpus": str(os.cpu_count()),
        "memory_gib": f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.0f}",
        "platform": plan.platform,
    }
    for process in plan.processes:
        if process.is_engine:
            devices = ",".join(map(str, process.devices)) or "none"
            facts[process.name] = f"node {process.node}, devices {devices}"
    if plan.platform != "cpu":
        for tool in _GPUS:
            output = output_of(tool, timeout=_TOOL_SECONDS)
            if output.code == 0:
                facts["gpus"] = output.out.strip()
                break
    return facts


def _cpu() -> str:
    for line in _text(Path("/proc/cpuinfo")).splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("model name", "Model"):
            return value.strip()
    return platform.machine()


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
