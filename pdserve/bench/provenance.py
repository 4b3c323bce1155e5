"""Reads what a result has to name: versions, hardware, recipe, and what was planned; and says which of it must be the
same for figures of one curve."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Mapping
from pathlib import Path

from pdserve.bench.clients.client import LoadClient
from pdserve.bench.result import MODEL_FILES, Provenance
from pdserve.installed.versions import PACKAGES
from pdserve.plan.model import Plan
from pdserve.preflight.facts import own_pdserve
from pdserve.run.directory import RunDir
from pdserve.system.process import output_of

_TOOL_SECONDS = 30.0
_GPUS = (
    ("nvidia-smi", "--query-gpu=index,name,memory.total,driver_version", "--format=csv,noheader"),
    ("rocm-smi", "--showproductname", "--csv"),
)


_CLIENT = "pdserve (client)"
"""pdserve with a digest of its code, which has its patches too."""
_SAME_KIND = ("series", "gfx version")
"""Columns of rocm-smi that are the same of two cards of a kind."""


def provenance(run: RunDir, plan: Plan, client: LoadClient, planned: Mapping[str, str]) -> Provenance:
    """What cannot be read is left out."""
    return Provenance(
        deployment=plan.name,
        run_id=run.run_id,
        began=time.time(),
        client=client.name,
        tokenizer=_absolute(client.tokenizer),
        versions={**_versions(run.versions), **client.versions, _CLIENT: own_pdserve()},
        hardware=_hardware(plan),
        recipe=_text(run.recipe),
        planned=planned,
    )


def _absolute(tokenizer: str) -> str:
    """A folder is the same from wherever it is named."""
    return str(Path(tokenizer).resolve()) if Path(tokenizer).is_dir() else tokenizer


def circumstances(about: Provenance) -> dict[str, str]:
    """Of a result, what must not change within a sweep, as far as it is known: engines, pdserve's code, the kind of
    machine, and the model. Not the host itself: another one of the same kind is the same."""
    facts: dict[str, str | None] = {"pdserve": about.versions.get(_CLIENT)}
    facts |= {package: about.versions.get(package) for package in PACKAGES}
    facts |= _kind_of(about.hardware)
    facts[MODEL_FILES] = about.planned.get(MODEL_FILES)
    return {name: value for name, value in facts.items() if value}


def circumstances_here(
    versions: Mapping[str, str | None], model_files: str | None, hardware: Mapping[str, str]
) -> dict[str, str]:
    """The same of what would be measured now, as far as that is known here. `versions`: of the engines; `hardware`: of
    `machine`."""
    about = Provenance(
        deployment="",
        run_id="",
        began=0.0,
        client="",
        tokenizer="",
        versions={**versions, _CLIENT: own_pdserve()},
        hardware=hardware,
        recipe="",
        planned={} if model_files is None else {MODEL_FILES: model_files},
    )
    return circumstances(about)


def differences(measured: Mapping[str, str], here: Mapping[str, str]) -> str | None:
    """In a line; what is unknown on one side is no difference. None: there is none."""
    lines = [
        f"{name} {measured[name]}, here is {here[name]}"
        for name in measured
        if name in here and measured[name] != here[name]
    ]
    return f"measured with {'; '.join(lines)}" if lines else None


def _kind_of(hardware: Mapping[str, str]) -> dict[str, str | None]:
    return {
        "CPU": hardware.get("cpu"),
        "CPUs": hardware.get("cpus"),
        "GPUs": _kinds_of_gpus(hardware["gpus"]) if "gpus" in hardware else None,
    }


def _kinds_of_gpus(listed: str) -> str:
    """Without their numbers and how many a job shows: the recipe has how many are used."""
    rows = [[cell.strip() for cell in line.split(",")] for line in listed.splitlines() if line.strip()]
    if rows and rows[0][0].lower() == "device":
        same = [place for place, title in enumerate(rows[0]) if title.lower().endswith(_SAME_KIND)]
        kinds = [[row[place] for place in same if place < len(row)] for row in rows[1:]]
    else:
        kinds = [row[1:] for row in rows]
    return "; ".join(sorted({", ".join(kind) for kind in kinds if kind}))


def _versions(file: Path) -> dict[str, str | None]:
    try:
        recorded = json.loads(_text(file))
    except ValueError:
        return {}
    return {name: value for name, value in recorded.items() if value is None or isinstance(value, str)}


def _hardware(plan: Plan) -> dict[str, str]:
    placed = {
        process.name: f"node {process.node}, devices {','.join(map(str, process.devices)) or 'none'}"
        for process in plan.processes
        if process.is_engine
    }
    return {**machine(plan.platform), **placed}


def machine(of_platform: str) -> dict[str, str]:
    """Hardware of this machine."""
    facts = {
        "host": platform.node(),
        "cpu": _cpu(),
        "cpus": str(os.cpu_count()),
        "memory_gib": f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.0f}",
        "platform": of_platform,
    }
    if of_platform != "cpu":
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
