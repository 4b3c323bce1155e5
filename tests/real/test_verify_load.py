"""`pdserve verify --load` on the real stack: a sound deployment is proven, and no injected fault passes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.launch.deployment import REPOSITORY, Deployment, pdserve
from tests.real import kv_corruption, kv_faults
from tests.real.conftest import brought_up

pytestmark = pytest.mark.real

REQUESTS, WINDOW = 16, 8


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a test names the fault that the engines shall have."""
    return tmp_path_factory.mktemp("faults") / "orders"


@pytest.fixture(scope="module")
def tiny(home: Path, faults: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    recipe = tmp_path_factory.mktemp("recipe") / "tiny-cpu.yaml"
    document = {
        "extends": str(REPOSITORY / "recipes" / "tiny-cpu.yaml"),
        "name": "tiny-cpu",
        "engine": {"env": kv_faults.installed(faults)},
        # A cut transfer leaves its blocks with prefill for so long: the next test needs them back.
        "timeouts": {"transfer_abort_seconds": 10},
    }
    recipe.write_text(yaml.safe_dump(document))
    yield from brought_up("tiny-cpu", home, recipe)


def load() -> tuple[int, dict[str, Any], str]:
    """Exit code, report and output of a load of which every answer is compared."""
    amount = ("--requests", str(REQUESTS), "--window", str(WINDOW), "--concurrency", "4")
    code, output = pdserve("verify", "--load", "--json", *amount, "--sample", "1", "--longest-prompt", "640")
    report: dict[str, Any] = json.JSONDecoder().raw_decode(output[output.index("{") :])[0]
    return code, report, output


def statuses(report: dict[str, Any]) -> dict[str, str]:
    return {proof["name"]: proof["status"] for proof in report["proofs"]}


def numbers(report: dict[str, Any], name: str) -> dict[str, Any]:
    return next(proof["numbers"] for proof in report["proofs"] if proof["name"] == name)


def test_a_sound_deployment_is_proven(tiny: Deployment) -> None:
    code, report, output = load()
    assert code == 0, output
    proofs = ("endpoints", "load-answers", "load-transfer", "load-reload", "load-clean", "load-output")
    assert statuses(report) == dict.fromkeys(proofs, "proven")
    assert [(window["first"], window["last"]) for window in report["windows"]] == [(0, 7), (8, 15)]
    # Two of four prefixes have one chunk, two have two; they were loaded again before the second window.
    assert numbers(report, "load-reload")["tokens loaded"] >= 6 * 256
    assert numbers(report, "load-answers")["cancelled"] > 0
    print(output)


@pytest.mark.parametrize("fault", [kv_corruption.OTHER_KV, kv_corruption.ZERO_LAYER, kv_corruption.STALE_CHUNK])
def test_wrong_kv_fails_the_comparison_and_nothing_else(tiny: Deployment, faults: Path, fault: str) -> None:
    with kv_faults.held(faults / fault):
        code, report, output = load()
    assert code == 6, output
    assert {name for name, status in statuses(report).items() if status != "proven"} == {"load-output"}, output
    assert numbers(report, "load-output")["share that differs"] > 0
    different = [window["different"] for window in report["windows"]]
    if fault == kv_corruption.STALE_CHUNK:
        assert different[0] == 0, "nothing is loaded from LMCache before the caches were cleared"
    assert sum(different) == numbers(report, "load-output")["answers that differ"]
    print(output)


def test_a_decode_that_computes_prompts_itself_fails_the_transfer(tiny: Deployment, faults: Path) -> None:
    with kv_faults.held(faults / kv_corruption.RECOMPUTE):
        code, report, output = load()
    assert code == 6, output
    assert statuses(report)["load-transfer"] == "failed", output
    assert numbers(report, "load-transfer")["computed on decode"] > 300
    assert statuses(report)["load-output"] == "proven", "what it computes itself is right"
    print(output)


def test_a_transfer_that_is_cut_fails_requests(tiny: Deployment, faults: Path) -> None:
    with kv_faults.held(faults / kv_corruption.CUT):
        code, report, output = load()
    assert code == 6, output
    assert statuses(report)["load-answers"] == "failed", output
    print(output)


def test_once_the_faults_are_gone_it_is_proven_again(tiny: Deployment) -> None:
    code, _, output = load()
    assert code == 0, output
