"""The record by which each process of an engine proves its patches: written here, and read by those who ask.

It is `<folder>/<pid>.json` (PatchRecord). It is written once when the patches are in, and again about a second after an
effect was counted, by a thread that exists only once there is something to count.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import threading
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from pdserve.atomic_write import replace_text
from pdserve.errors import StartError
from pdserve.installed.distributions import installed
from pdserve.patches import effects
from pdserve.patches.registry import REGISTRY

_WRITE_EVERY_SECONDS = 1.0


@dataclass
class PatchStanding:
    """The patches that this process was given, and what it did with each."""

    active: list[str] = field(default_factory=list)
    allowed_unknown: list[str] = field(default_factory=list)
    """Active although the code is unknown: the recipe allowed it."""
    skipped: dict[str, str] = field(default_factory=dict)
    """Optional patches that were left out -> why."""
    not_needed: dict[str, str] = field(default_factory=dict)
    """Patches whose correction the code has itself -> why."""


_current = PatchStanding()


def begin() -> PatchStanding:
    """Begin a new standing for this process, which `left_out` looks at from now on."""
    global _current
    _current = PatchStanding()
    return _current


def is_active(patch: str) -> bool:
    """Tell whether the patch has been applied in this process: for a patch that depends on an earlier one."""
    return patch in _current.active


def left_out(patch: str) -> bool:
    """Tell whether this process was given the patch and did without it.

    A module of pdserve.connectors then hands vLLM upstream's own class.
    """
    return patch in _current.skipped or patch in _current.not_needed


class Publisher:
    """Writes the record of this process, and writes it again as effects are counted. Owns one daemon thread."""

    def __init__(self, standing: PatchStanding, folder: str | None) -> None:
        self._standing = standing
        self._folder = Path(folder) if folder else None
        self._dirty = threading.Event()
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Prints the patches on stderr, whatever vLLM's log level, and writes the first record.

        Raises StartError when the record cannot be written: there would be no proof that the patches are active.
        """
        active = ", ".join(self._standing.active) or "none"
        print(f"pdserve patches active: {active} (pid {os.getpid()}, process {process_name()})", file=sys.stderr)
        for name, why in self._standing.skipped.items():
            print(f"WARNING: pdserve patch {name} is left out: {why}", file=sys.stderr)
        sys.stderr.flush()
        if self._folder is not None:
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
                self._write()
            except OSError as error:
                # One line: all that a log shows of an exception is its message.
                raise StartError(
                    f"this process cannot report its patches in {self._folder}: {error}; the run directory must be "
                    "writable, and its disk not full, on every node"
                ) from error
            effects.notify(self._changed)
            os.register_at_fork(after_in_child=self._forked)

    def _changed(self) -> None:
        self._dirty.set()
        with self._starting:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="pdserve-patch-record", daemon=True)
                self._thread.start()

    def _forked(self) -> None:
        # The name of a forked child is not set yet, so the thread writes its first record, not this hook.
        effects.forget()
        self._dirty, self._starting, self._thread = threading.Event(), threading.Lock(), None
        self._changed()

    def _run(self) -> None:
        pause = threading.Event()
        while True:
            self._dirty.wait()
            pause.wait(_WRITE_EVERY_SECONDS)
            self._dirty.clear()
            try:
                self._write()
            except OSError as error:
                # A full disk or a run directory that is gone: the engine serves on, the next change tries again.
                print(f"WARNING: pdserve patch record was not written: {error}", file=sys.stderr, flush=True)

    def _write(self) -> None:
        assert self._folder is not None
        replace_text(self._folder / f"{os.getpid()}.json", json.dumps(self._record()) + "\n")

    def _record(self) -> dict[str, Any]:
        counted: dict[str, dict[str, float]] = {}
        for (patch, effect), value in effects.totals().items():
            counted.setdefault(patch, {})[effect] = value
        return {
            "pid": os.getpid(),
            "session": os.getsid(0),
            "process": process_name(),
            "kind": process_kind(process_name()),
            "active": self._standing.active,
            "allowed_unknown": self._standing.allowed_unknown,
            "skipped": self._standing.skipped,
            "not_needed": self._standing.not_needed,
            "effects": counted,
            "versions": installed(),
        }


def process_name() -> str:
    """Return the name of this process: EngineCore, VllmWorker-0, ... as vLLM names its children; for a main process the
    module that it runs."""
    name = multiprocessing.current_process().name
    if name != "MainProcess":
        return name
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return spec.name if spec is not None else Path(sys.argv[0]).name or name


_SERVERS = ("vllm", "vllm.entrypoints.cli.main", "pdserve.patches.vllm_cpu_serve_main")


def process_kind(name: str) -> str:
    """Return the ProcessKind of a process by its name, or `other`: vLLM inspects models in a process of their own,
    too."""
    if name.startswith("EngineCore"):
        return "engine-core"
    if "Worker" in name:
        return "worker"
    if "lmcache" in name:
        return "lmcache-server"
    if name.startswith("ApiServer") or "api_server" in name or name in _SERVERS:
        return "api-server"
    return "other"


class PatchRecord(BaseModel):
    """The record of one process, as a Publisher writes it."""

    model_config = ConfigDict(frozen=True)

    pid: int
    session: int
    process: str
    kind: str
    active: tuple[str, ...]
    allowed_unknown: tuple[str, ...] = ()
    skipped: dict[str, str] = {}
    not_needed: dict[str, str] = {}
    effects: dict[str, dict[str, float]] = {}
    versions: dict[str, str | None] = {}


def read_records(folder: Path) -> list[PatchRecord]:
    """Read the records of a folder, by pid; one that is gone or unreadable by now is left out.

    So is one of a process that does not serve: vLLM looks at a model's class in a process of its own.
    """
    records = []
    for path in sorted(folder.glob("*.json")):
        try:
            record = PatchRecord.model_validate(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, ValidationError):
            continue
        if record.kind != "other":
            records.append(record)
    return records


def merged_effects(records: Iterable[PatchRecord]) -> dict[str, dict[str, float]]:
    """Return patch -> effect -> value over all processes."""
    merged: dict[str, dict[str, float]] = {}
    for record in records:
        for patch, counted in record.effects.items():
            for effect, value in counted.items():
                total = merged.setdefault(patch, {})
                total[effect] = total.get(effect, 0) + value
    return merged


def shortcomings(records: Sequence[PatchRecord], patches: Collection[str], workers: int, cores: int) -> list[str]:
    """List what keeps an engine from being proven patched, one sentence each; none: it is.

    `patches`: those that it was started with. `workers`: TP x PP x DP; `cores`: DP ranks. A single worker may live in
    EngineCore's own process (vLLM does so on one GPU), and then has no record of its own.
    """
    if not patches:
        return []
    missing_proofs = []
    for kind, at_least in (("api-server", 1), ("engine-core", cores), ("worker", 0 if workers == 1 else workers)):
        number = sum(record.kind == kind for record in records)
        if number < at_least:
            missing_proofs.append(f"{at_least} {kind} process(es) must report their patches, {number} did")
    required = {patch.name for patch in REGISTRY if patch.required} & set(patches)
    spared = {patch.name for patch in REGISTRY if patch.serves_without}
    for record in records:
        left_out = spared & set(record.skipped)
        if missing := sorted(required - left_out - set(record.active) - set(record.not_needed)):
            missing_proofs.append(f"{record.process} (pid {record.pid}) runs without {', '.join(missing)}")
    return missing_proofs


def register_metrics(folder: str) -> None:
    """Put the effects of an engine's patches on its own /metrics, whichever of its processes counted them.

    The API server reads the records of the processes of its session when it is scraped. It does so through
    prometheus_client's default registry: with several API servers in front of one engine (--api-server-count) vLLM
    builds another registry for every scrape, and the effects are then only in `pdserve status`.
    """
    from prometheus_client import REGISTRY as METRICS

    METRICS.register(EffectsCollector(Path(folder), os.getsid(0)))


class EffectsCollector:
    """Collects for prometheus_client: it is asked for its metrics at every scrape."""

    def __init__(self, folder: Path, session: int) -> None:
        self._folder = folder
        self._session = session

    def describe(self) -> list[Any]:
        """Name no metrics: prometheus_client would otherwise scrape once to find the names."""
        return []

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        records = [record for record in read_records(self._folder) if record.session == self._session]
        processes = Counter(patch for record in records for patch in record.active)
        active = GaugeMetricFamily(
            "pdserve_patch_active_processes", "Processes of this engine in which a patch is active.", labels=["patch"]
        )
        for patch, number in sorted(processes.items()):
            active.add_metric([patch], number)
        labels = ["patch", "effect"]
        counters = CounterMetricFamily("pdserve_patch_effects", "What the patches did since the start.", labels=labels)
        gauges = GaugeMetricFamily("pdserve_patch_state", "What the patches hold right now.", labels=labels)
        goes_down = {(patch.name, name) for patch in REGISTRY for name in patch.gauges}
        for patch, counted in sorted(merged_effects(records).items()):
            for effect, value in sorted(counted.items()):
                (gauges if (patch, effect) in goes_down else counters).add_metric([patch, effect], value)
        yield from (active, counters, gauges)
