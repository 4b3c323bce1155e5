"""results.json: every sample, medians over visits, and the goals. No I/O but reading and writing that file."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

FOREIGN_LIMIT = 0.3
"""CPUs. A sample while others were busier than this is marked."""
BASELINE = "direct"
ADDED = ("ttft_p50_ms", "ttft_p99_ms", "delay_p50_ms", "delay_p99_ms")
"""Figures of which the baseline's is taken off, as added_*: within a visit, because load changes between visits."""

Summary = dict[str, dict[str, dict[str, float]]]
"""scenario -> system -> figure -> median."""


@dataclass(frozen=True)
class Sample:
    """One visit of a scenario to one system."""

    round: int
    scenario: str
    system: str
    figures: dict[str, float]
    foreign: float = 0.0
    waited: float = 0.0
    error: str | None = None
    """Why it has no figures."""
    visit: int = 0
    """Within the round, from 0. Only the first has figures of memory: a later one finds what those before it left."""

    @property
    def clean(self) -> bool:
        return self.foreign <= FOREIGN_LIMIT


@dataclass
class Results:
    """What a run found out."""

    meta: dict[str, Any]
    samples: list[Sample] = field(default_factory=list)
    soak: list[dict[str, Any]] = field(default_factory=list)

    def summary(self) -> Summary:
        return summarise(self.samples)

    def failures(self) -> list[Sample]:
        return [sample for sample in self.samples if sample.error]

    def noisy(self) -> dict[str, list[str]]:
        """system -> scenarios of which no sample was clean: their medians are of marked ones."""
        without_clean: dict[str, list[str]] = {}
        for (scenario, system), group in _grouped(self.samples).items():
            if not any(sample.clean for sample in group):
                without_clean.setdefault(system, []).append(scenario)
        return without_clean

    def write(self, path: Path, goals: Iterable[Any]) -> None:
        document = {
            "meta": self.meta,
            "summary": self.summary(),
            "goals": [asdict(goal) for goal in goals],
            "noisy": self.noisy(),
            "soak": self.soak,
            "samples": [asdict(sample) | {"clean": sample.clean} for sample in self.samples],
        }
        path.write_text(json.dumps(_rounded(document), indent=1) + "\n")

    @staticmethod
    def read(path: Path) -> Results:
        document = json.loads(path.read_text())
        for sample in document["samples"]:
            del sample["clean"]
        return Results(document["meta"], [Sample(**sample) for sample in document["samples"]], document["soak"])


def summarise(samples: Iterable[Sample]) -> Summary:
    """Medians over clean visits; over all of them where none was clean."""
    samples = list(samples)
    # Of a baseline that was taken again, the last: it is the clean one, if any is.
    baselines = {(item.round, item.visit, item.scenario): item for item in samples if item.system == BASELINE}
    summary: Summary = {}
    for (scenario, system), group in _grouped(samples).items():
        rows = []
        for sample in group:
            baseline = baselines.get((sample.round, sample.visit, scenario))
            rows.append((sample.clean, sample.figures))
            if baseline and system != BASELINE and not baseline.error:
                added = {
                    f"added_{name}": sample.figures[name] - baseline.figures[name]
                    for name in ADDED
                    if name in sample.figures
                }
                rows.append((sample.clean and baseline.clean, added))
        names = dict.fromkeys(name for _, figures in rows for name in figures)
        summary.setdefault(scenario, {})[system] = {name: _median(rows, name) for name in names}
    return summary


def pairs(
    samples: Iterable[Sample], scenario: str, figure: str, ours: str, reference: str
) -> list[tuple[float, float]]:
    """A figure of two systems in the same visit; of clean visits only, if there are any."""
    visits: dict[tuple[int, int], dict[str, Sample]] = {}
    for item in samples:
        if item.scenario == scenario and figure in item.figures:
            visits.setdefault((item.round, item.visit), {})[item.system] = item
    both = [(visit[ours], visit[reference]) for visit in visits.values() if ours in visit and reference in visit]
    clean = [(one, other) for one, other in both if one.clean and other.clean]
    return [(one.figures[figure], other.figures[figure]) for one, other in clean or both]


def _grouped(samples: Iterable[Sample]) -> dict[tuple[str, str], list[Sample]]:
    groups: dict[tuple[str, str], list[Sample]] = {}
    samples = list(samples)
    order = list(dict.fromkeys(sample.system for sample in samples))  # the turning order of later scenarios is no order
    for sample in sorted(samples, key=lambda sample: order.index(sample.system)):
        if not sample.error:
            groups.setdefault((sample.scenario, sample.system), []).append(sample)
    return groups


def _median(rows: list[tuple[bool, dict[str, float]]], name: str) -> float:
    having = [(clean, figures[name]) for clean, figures in rows if name in figures]
    return statistics.median([value for clean, value in having if clean] or [value for _, value in having])


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list) else value
