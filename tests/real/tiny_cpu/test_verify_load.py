"""`pdserve verify --load` on the real stack: no injected fault passes, and a sound deployment is proven."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.launch.deployment import Deployment, pdserve
from tests.real import kv_faults

pytestmark = pytest.mark.real


def load() -> tuple[int, dict[str, Any], dict[str, str], str]:
    """Exit code, report, status of each proof and output of a load of which every answer is compared."""
    amount = ("--requests", "16", "--window", "8", "--concurrency", "4")
    code, output = pdserve("verify", "--load", "--json", *amount, "--sample", "1", "--longest-prompt", "640")
    report: dict[str, Any] = json.JSONDecoder().raw_decode(output[output.index("{") :])[0]
    return code, report, {proof["name"]: proof["status"] for proof in report["proofs"]}, output


def numbers(report: dict[str, Any], name: str) -> dict[str, Any]:
    return next(proof["numbers"] for proof in report["proofs"] if proof["name"] == name)


@pytest.mark.parametrize("fault", [kv_faults.OTHER_KV, kv_faults.STALE_CHUNK])
def test_wrong_kv_fails_the_comparison_and_nothing_else(tiny: Deployment, faults: Path, fault: str) -> None:
    with kv_faults.held(faults / fault):
        code, report, statuses, output = load()
    assert code == 6, output
    assert {name for name, status in statuses.items() if status != "proven"} == {"load-output"}, output
    assert numbers(report, "load-output")["share that differs"] > 0
    different = [window["different"] for window in report["windows"]]
    if fault == kv_faults.STALE_CHUNK:
        assert different[0] == 0, "nothing is loaded from LMCache before the caches were cleared"
    assert sum(different) == numbers(report, "load-output")["answers that differ"]


def test_a_decode_that_computes_prompts_itself_fails_the_transfer(tiny: Deployment, faults: Path) -> None:
    with kv_faults.held(faults / kv_faults.RECOMPUTE):
        code, report, statuses, output = load()
    assert code == 6, output
    assert statuses["load-transfer"] == "failed", output
    assert numbers(report, "load-transfer")["computed on decode"] > 300
    assert statuses["load-output"] == "proven", "what it computes itself is right"


def test_a_sound_deployment_is_proven(tiny: Deployment) -> None:
    """Also by what comes after these faults."""
    code, report, statuses, output = load()
    assert code == 0, output
    proofs = ("endpoints", "load-answers", "load-transfer", "load-reload", "load-clean", "load-output")
    assert statuses == dict.fromkeys(proofs, "proven")
    assert [(window["first"], window["last"]) for window in report["windows"]] == [(0, 7), (8, 15)]
    # Two of four prefixes have one chunk, two have two; they were loaded again before the second window.
    assert numbers(report, "load-reload")["tokens loaded"] >= 6 * 256
    assert numbers(report, "load-answers")["cancelled"] > 0
