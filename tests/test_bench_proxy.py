"""The proxy benchmark runs from end to end. No time is asserted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.proxy.goals import judge
from benchmarks.proxy.results import Sample
from tests.tables import each_row

ROOT = Path(__file__).parents[1]


def sample(number: int, system: str, figures: dict[str, float], *, foreign: float = 0.0, name: str = "ttft") -> Sample:
    return Sample(number, name, system, figures, foreign)


@pytest.mark.process
@pytest.mark.full
def test_every_kind_of_load_passes_through_a_relay(tmp_path: Path) -> None:
    scenarios = ("requests", "ttft-prefill", "streams-64-paced", "body-1MB")
    command = [sys.executable, "-m", "benchmarks.proxy", "--size", "smoke", "--systems", "direct,toy"]
    command += [f"--only={name}" for name in scenarios] + ["--output", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((tmp_path / "results.json").read_text())
    assert {(row["scenario"], row["system"]) for row in results["samples"]} == {
        (scenario, system) for scenario in scenarios for system in ("direct", "toy")
    }
    assert not [row["error"] for row in results["samples"] if row["error"]]
    assert results["summary"]["requests"]["toy"]["cpu_ms_per_request"] > 0


@each_row("ours, passed", [(0.05, True), (0.2, False)])
def test_a_goal_is_a_ratio_to_the_reference_of_the_same_run(ours: float, passed: bool) -> None:
    samples = [
        sample(0, "vllm-router", {"cpu_ms_per_request": 0.1}, name="requests"),
        sample(0, "pdserve", {"cpu_ms_per_request": ours}, name="requests"),
    ]
    (goal,) = judge(samples)
    assert goal.value == pytest.approx(ours / 0.1)
    assert goal.passed is passed
