"""The benchmark of the patches: that it runs, and when it calls a cost decided. No time is asserted."""

from __future__ import annotations

import dataclasses
import json
import subprocess
from pathlib import Path

import pytest

from benchmarks.patches.figures import Figure
from benchmarks.patches.interval import interval
from benchmarks.patches.report import judged
from tests.tables import each_row

FIGURE = Figure("decode", "some-patch", 3000.0, 3000.0, 8, 1.0, 0.99, 1.01, 1.001, 1.002, 12_000_000)


def test_the_middle_and_the_interval_are_those_of_all_averages_of_two() -> None:
    # Of 10 values, the sets of signs with a rank sum up to 3 have a probability of 5 in 1024, up to 4 of 7: below and
    # above 0.5 %. So three averages are left out at each end of 1, 1.5, 2, 2, 2.5, ... 9.5, 10.
    low, middle, high = interval([float(value) for value in range(1, 11)])
    assert (low, middle, high) == (2.0, 5.5, 9.0)


@each_row(
    "low, high, verdict",
    [(0.99, 1.029, True), (0.99, 1.031, None), (1.029, 1.05, None), (1.031, 1.05, False), (None, None, None)],
)
def test_an_interval_on_one_side_decides(low: float | None, high: float | None, verdict: bool | None) -> None:
    assert dataclasses.replace(FIGURE, low=low, high=high).verdict is verdict


def test_what_is_not_decided_and_what_costs_too_much_are_named_and_the_rest_counted() -> None:
    figures = [
        FIGURE,
        dataclasses.replace(FIGURE, system="slow", low=1.04, high=1.06),
        dataclasses.replace(FIGURE, system="unclear", low=0.97, high=1.04, instructions=None),
        dataclasses.replace(FIGURE, system="all", low=1.04, high=1.06),
    ]
    assert judged(figures) == [
        "FAIL: slow costs +4.0% to +6.0% of a step in decode (limit 3%), +0.2% by instructions",
        "not decided: unclear costs -3.0% to +4.0% of a step in decode (limit 3%), unknown by instructions",
        "pass: 1 of 3 costs of single patches are below 3% of a step",
    ]


@pytest.mark.upstream
@pytest.mark.full
def test_every_scenario_runs_patched_and_unpatched() -> None:
    script = Path(__file__).parents[1] / "scripts" / "bench-patches"
    command = [str(script), "--smoke", "--systems", "all", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-8000:]
    figures = json.loads(done.stdout.splitlines()[-1])["figures"]
    assert {figure["scenario"] for figure in figures} == {"prefill", "prefill-pending", "decode", "decode-parked"}
    for figure in figures:
        assert figure["step_us"] > 0
        assert figure["bytecodes"] > 1, "the patches are on one side only"
