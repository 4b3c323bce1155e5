"""Patched and unpatched schedulers, step by step in turn; ratios of what belongs together."""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import count
from math import exp, log
from typing import Any

from benchmarks.patches.counts import Cell, bytecodes, instructions
from benchmarks.patches.engines import SCENARIOS
from benchmarks.patches.figures import ALL, CONTROL, Figure
from benchmarks.patches.interval import interval
from benchmarks.patches.process import Side, prepare
from pdserve.installed.distributions import installed
from pdserve.patches.registry import REGISTRY
from pdserve.patches.verdict import judge


@dataclass(frozen=True)
class Size:
    """How long it takes."""

    fewest: int
    """Rounds of each system and scenario; those that are not decided then get more, as long as there is time."""
    most: int
    steps: int
    """Of each side in a round."""
    minutes: float
    """No further rounds after that; the exact figures come in addition."""
    exact_steps: int
    instructions: bool


FULL = Size(fewest=8, most=60, steps=32, minutes=9, exact_steps=4, instructions=True)
SMOKE = Size(fewest=1, most=1, steps=1, minutes=0, exact_steps=1, instructions=False)

Round = tuple[int, int]
"""ns of the CPU, patched and unpatched."""


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
    """Every chosen system in every chosen scenario."""
    known = systems()
    named = {(scenario, known[name]): name for scenario in scenarios for name in chosen}
    unpatched = [(scenario, ()) for scenario in scenarios]
    # First: what is counted is not disturbed by anything, and valgrind has a process of its own.
    machine = instructions({*named, *unpatched}) if size.instructions else None
    prepare()
    interpreter = bytecodes({*named, *unpatched}, size.exact_steps)
    rounds: dict[Cell, list[Round]] = {cell: [] for cell in named}
    figures: dict[Cell, Figure] = {}
    layouts, until, number = count(), time.monotonic() + 60 * size.minutes, 0
    open_cells = list(named)
    while number < size.fewest or (open_cells and number < size.most and time.monotonic() < until):
        for cell in open_cells:
            rounds[cell].append(_round(cell, size.steps, number, (next(layouts), next(layouts))))
            figures[cell] = _figure(named[cell], cell, rounds[cell], size.steps, interpreter, machine)
        number += 1
        if number >= size.fewest:
            open_cells = [cell for cell in open_cells if figures[cell].verdict is None]
        print(f"round {number}: {len(open_cells)} of {len(named)} not decided", file=sys.stderr)
    return list(figures.values())


def _round(cell: Cell, steps: int, number: int, layouts: tuple[int, int]) -> Round:
    """Two fresh processes on one CPU, the next one in the next round; the first to step is the other one each time."""
    scenario, patches = cell
    cpus = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cpus[number % len(cpus)]})  # of the forks, too
    # Which of two forks is made first is worth 1 to 2 % of a step: with the patched always first the control was off.
    if number // 2 % 2:
        plain, with_patches = Side((), scenario, layouts[0]), Side(patches, scenario, layouts[1])
    else:
        with_patches, plain = Side(patches, scenario, layouts[0]), Side((), scenario, layouts[1])
    ours = theirs = 0
    try:
        for step in range(steps):
            if (step + number) % 2:
                theirs += plain.step()
                ours += with_patches.step()
            else:
                ours += with_patches.step()
                theirs += plain.step()
    finally:
        for side in (with_patches, plain):
            side.close()
        os.sched_setaffinity(0, cpus)
    return ours, theirs


def _figure(
    name: str,
    cell: Cell,
    rounds: Sequence[Round],
    steps: int,
    interpreter: Mapping[Cell, int],
    machine: Mapping[Cell, int] | None,
) -> Figure:
    unpatched: Cell = (cell[0], ())
    low, middle, high = interval([log(ours / theirs) for ours, theirs in rounds])
    return Figure(
        scenario=cell[0],
        system=name,
        step_us=round(statistics.median(ours for ours, _ in rounds) / steps / 1000, 1),
        unpatched_us=round(statistics.median(theirs for _, theirs in rounds) / steps / 1000, 1),
        rounds=len(rounds),
        ratio=round(exp(middle), 4),
        low=None if low is None else round(exp(low), 4),
        high=None if high is None else round(exp(high), 4),
        bytecodes=round(interpreter[cell] / interpreter[unpatched], 5),
        instructions=None if machine is None else round(machine[cell] / machine[unpatched], 5),
        instructions_a_step=None if machine is None else machine[cell],
    )


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
