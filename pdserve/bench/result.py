"""The result of a benchmark: what was measured, on what, whether it counts, and where it is stored.

<home>/<deployment>/bench/<id>/      beside the runs of the deployment, so that it outlives a run that is removed
    result.json                      provenance, figures and verdict of every measurement
    events.jsonl                     the history of the run, to the end of the last measurement
    <load>.<repeat>.json, .log       the client's own result, and what it printed
    <load>.<repeat>.warmup.*         the same of the warm-up, which counts in nothing
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Mapping
from pathlib import Path

from pdserve.bench.clients import LoadClient
from pdserve.bench.figures import Figures
from pdserve.bench.snapshot import CpuUse, DeploymentSnapshot, Peaks
from pdserve.bench.validity import BenchVerdict
from pdserve.bench.workload import Load, TraceFacts, Workload
from pdserve.errors import StateError
from pdserve.installed.versions import PACKAGES
from pdserve.plan.frozen import SCHEMA, Frozen, SchemaVersion
from pdserve.plan.model import Plan
from pdserve.preflight.facts import own_pdserve
from pdserve.run.directory import RunDir
from pdserve.run.stored_model import read_model
from pdserve.system.process import output_of

MODEL_FILES = "model files"
"""In `planned`: which model lay where the recipe names it (pdserve.models.files)."""


class Provenance(Frozen):
    """Tells what was measured, as far as it decides the figures. No secrets."""

    deployment: str
    run_id: str
    began: float
    """Wall-clock seconds."""
    client: str
    tokenizer: str
    """What the client counts tokens with: a folder, or a name at Hugging Face."""
    versions: Mapping[str, str | None]
    """pdserve and its commit, Python, kernel and every engine package, as the run has recorded them at its start."""
    hardware: Mapping[str, str]
    """The hardware of the machine with the client; of other nodes only their names and devices are known."""
    recipe: str
    """The resolved recipe (YAML)."""
    planned: Mapping[str, str] = {}
    """What `pdserve plan` has of it: the model's files, blocks, requests at once, tokens in L1. What could not be read
    or computed is missing."""


class Window(Frozen):
    """Holds our own figures over the same window: what each role counted between the two readings."""

    prefill: Mapping[str, float] = {}
    """The figures of prefill; in mode aggregated, of all engines."""
    decode: Mapping[str, float] = {}
    lmcache: Mapping[str, float] = {}
    proxy: Mapping[str, float] = {}
    peaks: Peaks = Peaks()
    client_cpu: CpuUse = CpuUse()
    proxy_cpu: CpuUse = CpuUse()

    @property
    def cache_hit(self) -> float | None:
        """Return the share that LMCache had of the tokens that it was asked for; None: it was not asked, or does not
        count them."""
        asked = self.lmcache.get("asked_tokens", 0.0)
        return self.lmcache["hit_tokens"] / asked if asked and "hit_tokens" in self.lmcache else None

    @property
    def moved_bytes(self) -> float | None:
        """Return the bytes of KV that were moved between engines. Mooncake counts it on prefill, which writes; NIXL
        where it is read or written from. None: no engine counts it."""
        return self._of_all_engines("nixl_bytes", "mooncake_bytes")

    @property
    def moved_seconds(self) -> float | None:
        """Return the seconds of all transfers of KV together: several at a time count several times."""
        return self._of_all_engines("nixl_seconds", "mooncake_seconds")

    def _of_all_engines(self, *names: str) -> float | None:
        counted = [counts[name] for counts in (self.prefill, self.decode) for name in names if name in counts]
        return sum(counted) if counted else None

    @property
    def prefix_hit(self) -> float | None:
        """Return the share of the prompt tokens on prefill (of mode aggregated: on all engines) that were not computed:
        the engine's own cache had them, or a cache tier. None: the engines do not count it."""
        if "computed" not in self.prefill or "local_hits" not in self.prefill:
            return None
        had = self.prefill["local_hits"] + self.prefill.get("received", 0.0)
        asked = had + self.prefill["computed"]
        return had / asked if asked else None


class Measurement(Frozen):
    """Holds what one run of a load has shown."""

    load: Load
    repeat: int
    verdict: BenchVerdict
    figures: Figures
    window: Window
    before: DeploymentSnapshot
    after: DeploymentSnapshot
    raw: str
    """The client's own output, beside the result."""
    log: str
    """What the client printed."""


class BenchResult(Frozen):
    """Is a result.json: all measurements of a benchmark."""

    schema_version: SchemaVersion = SCHEMA
    provenance: Provenance
    workload: Workload
    trace: TraceFacts | None = None
    measurements: tuple[Measurement, ...]

    @property
    def valid(self) -> bool:
        """Return whether every measurement counts."""
        return all(measurement.verdict.valid for measurement in self.measurements)


_TOOL_SECONDS = 30.0
_GPUS = (
    ("nvidia-smi", "--query-gpu=index,name,memory.total,driver_version", "--format=csv,noheader"),
    ("rocm-smi", "--showproductname", "--csv"),
)


CLIENT_CODE = "pdserve (client)"
"""pdserve with a digest of its code, which has its patches too."""
_SAME_KIND = ("series", "gfx version")
"""Columns of rocm-smi that are the same of two cards of a kind."""


def provenance(run: RunDir, plan: Plan, client: LoadClient, planned: Mapping[str, str]) -> Provenance:
    """Read what decides the figures of a run's deployment. What cannot be read is left out."""
    return Provenance(
        deployment=plan.name,
        run_id=run.run_id,
        began=time.time(),
        client=client.name,
        tokenizer=_absolute(client.tokenizer),
        versions={**_versions(run.versions), **client.versions, CLIENT_CODE: own_pdserve()},
        hardware=_hardware(plan),
        recipe=_text(run.recipe),
        planned=planned,
    )


def _absolute(tokenizer: str) -> str:
    """Return a tokenizer's folder as an absolute path: it is the same from wherever it is named."""
    return str(Path(tokenizer).resolve()) if Path(tokenizer).is_dir() else tokenizer


def fixed_circumstances(about: Provenance) -> dict[str, str]:
    """Return of a result what must not change within a sweep, as far as it is known."""
    return circumstances(about.versions, about.hardware, about.planned.get(MODEL_FILES))


def circumstances(
    versions: Mapping[str, str | None], hardware: Mapping[str, str], model_files: str | None
) -> dict[str, str]:
    """Return what must not change within a sweep, as far as it is known: engines, pdserve's code, the kind of machine,
    and the model. Not the host itself: another one of the same kind is the same."""
    facts = {
        "pdserve": versions.get(CLIENT_CODE),
        **{package: versions.get(package) for package in PACKAGES},
        "CPU": hardware.get("cpu"),
        "CPUs": hardware.get("cpus"),
        "GPUs": _kinds_of_gpus(hardware["gpus"]) if "gpus" in hardware else None,
        MODEL_FILES: model_files,
    }
    return {name: value for name, value in facts.items() if value}


def differences(measured: Mapping[str, str], here: Mapping[str, str]) -> str | None:
    """Return the differences in a line; what is unknown on one side is no difference. None: there is none."""
    lines = [
        f"{name} {measured[name]}, here is {here[name]}"
        for name in measured
        if name in here and measured[name] != here[name]
    ]
    return f"measured with {'; '.join(lines)}" if lines else None


def _kinds_of_gpus(listed: str) -> str:
    """Return the kinds of GPUs without their numbers and how many a job shows: the recipe has how many are used."""
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
    """Describe the hardware of this machine."""
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


RESULT, EVENTS = "result.json", "events.jsonl"
_FOLDER = "bench"


def new_folder(root: Path, deployment: str, bench_id: str) -> Path:
    return root / deployment / _FOLDER / bench_id


def read_result(root: Path, which: str) -> BenchResult:
    """Read a result. `which`: the id of a benchmark, its folder, or its file. Raises StateError."""
    file = result_file(root, which)
    try:
        data = file.read_bytes()
    except OSError as error:
        raise StateError(
            "this result cannot be read", where=str(file), cause=error.strerror or str(error), todo=_known(root)
        ) from None
    todo = "measure again: pdserve bench"
    return read_model(BenchResult, data, file, other_version=todo, damaged=todo)


def result_file(root: Path, which: str) -> Path:
    """Return the path at which a result should be. Raises StateError for what is no id, no folder and no file."""
    path = Path(which)
    if path.is_file():
        return path
    if path.is_dir():
        return path / RESULT
    matches = sorted(root.glob(f"*/{_FOLDER}/{which}/{RESULT}")) if "/" not in which and "*" not in which else []
    if not matches:
        raise StateError(
            f"there is no benchmark {which!r}",
            where=str(root),
            cause="it is no id, no folder and no file of a result",
            todo=_known(root),
        )
    return matches[0]


def _known(root: Path) -> str:
    ids = sorted(file.parent.name for file in root.glob(f"*/{_FOLDER}/*/{RESULT}"))
    return (
        f"the newest results are {', '.join(ids[-5:])}" if ids else "make a result: pdserve bench --concurrency 1,4,8"
    )
