"""Patched and unpatched schedulers, block by block in turn; ratios of what belongs together, never of sums."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.patches.engines import SCENARIOS
from benchmarks.patches.process import Side
from pdserve.installed.distributions import installed
from pdserve.patches.registry import REGISTRY
from pdserve.patches.verdict import judge

CONTROL, ALL = "unpatched", "all"
COUNTED_STEPS = 4


@dataclass(frozen=True)
class Size:
    """How long it takes: a round has two blocks of each side, in the order ABBA."""

    rounds: int
    steps: int
    """Of a block."""


FULL, SMOKE = Size(rounds=6, steps=4), Size(rounds=1, steps=1)


@dataclass(frozen=True)
class Figure:
    """One system in one scenario, beside an unpatched scheduler that took the same steps."""

    scenario: str
    system: str
    step_us: float
    """Median of its blocks."""
    unpatched_us: float
    ratio: float
    """Median over rounds; both sides of a round belong together."""
    low: float
    high: float
    """Quartiles of the rounds."""
    operations: int
    """Bytecodes of one step."""
    unpatched_operations: int

    @property
    def operations_ratio(self) -> float:
        return self.operations / self.unpatched_operations


def patches_here() -> tuple[str, ...]:
    """Those that change what an EngineCore with these connectors does, on the installed versions."""
    connectors = {"MultiConnector", "LMCacheMPConnector", "MooncakeConnector"}
    versions = installed()
    return tuple(
        patch.name
        for patch in REGISTRY
        if "engine-core" in patch.runs_in
        and patch.connectors <= connectors
        and "cuda" in patch.platforms
        and judge(patch, versions).outcome == "apply"
    )


def systems() -> dict[str, tuple[str, ...]]:
    """Name -> patches. The first is unpatched like what it is compared with: how much of a ratio is noise."""
    names = patches_here()
    return {CONTROL: (), ALL: names, **{name: (name,) for name in names}}


def measure(chosen: Sequence[str], scenarios: Sequence[str], size: Size) -> list[Figure]:
    """Every chosen system in every chosen scenario, one pair of processes at a time in each round."""
    known = systems()
    with _pairs({name: known[name] for name in chosen}) as pairs:
        ratios: dict[tuple[str, str], list[float]] = {}
        blocks: dict[tuple[str, str], tuple[list[int], list[int]]] = {}
        for number in range(size.rounds + 1):
            for scenario in scenarios:
                for name, (plain, patched) in pairs.items():
                    order = (plain, patched, patched, plain) if number % 2 else (patched, plain, plain, patched)
                    taken = [(side, side.steps(scenario, size.steps)) for side in order]
                    if number == 0 and size.rounds > 1:
                        continue  # the engines were made in it
                    ours = [ns for side, ns in taken if side is patched]
                    theirs = [ns for side, ns in taken if side is plain]
                    ratios.setdefault((scenario, name), []).append(sum(ours) / sum(theirs))
                    seen = blocks.setdefault((scenario, name), ([], []))
                    seen[0].extend(ours)
                    seen[1].extend(theirs)
        figures = []
        for (scenario, name), found in ratios.items():
            plain, patched = pairs[name]
            low, middle, high = _quartiles(found)
            ours_ns, theirs_ns = blocks[scenario, name]
            figures.append(
                Figure(
                    scenario=scenario,
                    system=name,
                    step_us=round(statistics.median(ours_ns) / size.steps / 1000, 1),
                    unpatched_us=round(statistics.median(theirs_ns) / size.steps / 1000, 1),
                    ratio=round(middle, 4),
                    low=round(low, 4),
                    high=round(high, 4),
                    operations=patched.operations(scenario, COUNTED_STEPS) // COUNTED_STEPS,
                    unpatched_operations=plain.operations(scenario, COUNTED_STEPS) // COUNTED_STEPS,
                )
            )
    return figures


def environment() -> dict[str, Any]:
    """What the figures were taken on."""
    return {
        "when": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "versions": {name: version for name, version in installed().items() if version is not None},
        "cpus": os.cpu_count(),
        "load average": list(os.getloadavg()),
        "nice": os.nice(0),
    }


def as_json(figures: Sequence[Figure], before: dict[str, Any]) -> dict[str, Any]:
    return {
        "environment": before,
        "scenarios": {scenario.name: scenario.text for scenario in SCENARIOS},
        "figures": [asdict(figure) for figure in figures],
    }


@contextmanager
def _pairs(chosen: dict[str, tuple[str, ...]]) -> Iterator[dict[str, tuple[Side, Side]]]:
    """For each system an unpatched process of its own: both take the same steps."""
    pairs: dict[str, tuple[Side, Side]] = {}
    try:
        for name, patches in chosen.items():
            pairs[name] = (Side(()), Side(patches))
        yield pairs
    finally:
        for pair in pairs.values():
            for side in pair:
                side.close()


def _quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high
