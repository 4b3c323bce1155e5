"""What a benchmark leaves: a file with what was measured, on what, and whether it counts."""

from __future__ import annotations

from collections.abc import Mapping

from pdserve.bench.evidence import CpuUse
from pdserve.bench.figures import Figures
from pdserve.bench.sampling import Peaks
from pdserve.bench.snapshot import DeploymentSnapshot
from pdserve.bench.traces.trace import TraceFacts
from pdserve.bench.validity import BenchVerdict
from pdserve.bench.workload import Load, Workload
from pdserve.plan.frozen import SCHEMA, Frozen, SchemaVersion

MODEL_FILES = "model files"
"""In `planned`: which model lay where the recipe names it (pdserve.models.files)."""


class Provenance(Frozen):
    """What was measured, as far as it decides the figures. No secrets."""

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
    """Of the machine with the client; of other nodes only their names and devices are known."""
    recipe: str
    """The resolved recipe (YAML)."""
    planned: Mapping[str, str] = {}
    """What `pdserve plan` has of it: the model's files, blocks, requests at once, tokens in L1. What could not be read
    or computed is missing."""


class Window(Frozen):
    """Our own figures over the same window: what each role counted between the two readings."""

    prefill: Mapping[str, float] = {}
    """Of mode aggregated: all engines."""
    decode: Mapping[str, float] = {}
    lmcache: Mapping[str, float] = {}
    proxy: Mapping[str, float] = {}
    peaks: Peaks = Peaks()
    client_cpu: CpuUse = CpuUse()
    proxy_cpu: CpuUse = CpuUse()

    @property
    def cache_hit(self) -> float | None:
        """Of the tokens that LMCache was asked for; None: it was not asked, or does not count them."""
        asked = self.lmcache.get("asked_tokens", 0.0)
        return self.lmcache["hit_tokens"] / asked if asked and "hit_tokens" in self.lmcache else None

    @property
    def moved_bytes(self) -> float | None:
        """Of KV, between engines. Mooncake counts it on prefill, which writes; NIXL where it is read or written from.
        None: no engine counts it."""
        return self._of_all_engines("nixl_bytes", "mooncake_bytes")

    @property
    def moved_seconds(self) -> float | None:
        """Of those transfers together: several at a time count several times."""
        return self._of_all_engines("nixl_seconds", "mooncake_seconds")

    def _of_all_engines(self, *names: str) -> float | None:
        counted = [counts[name] for counts in (self.prefill, self.decode) for name in names if name in counts]
        return sum(counted) if counted else None

    @property
    def prefix_hit(self) -> float | None:
        """Of the prompt tokens on prefill (of mode aggregated: on all engines), those that were not computed: the
        engine's own cache had them, or a cache tier. None: the engines do not count it."""
        if "computed" not in self.prefill or "local_hits" not in self.prefill:
            return None
        had = self.prefill["local_hits"] + self.prefill.get("received", 0.0)
        asked = had + self.prefill["computed"]
        return had / asked if asked else None


class Measurement(Frozen):
    """A load, once."""

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
    """result.json"""

    schema_version: SchemaVersion = SCHEMA
    provenance: Provenance
    workload: Workload
    trace: TraceFacts | None = None
    measurements: tuple[Measurement, ...]

    @property
    def valid(self) -> bool:
        """Whether every measurement counts."""
        return all(measurement.verdict.valid for measurement in self.measurements)
