"""The patches on vLLM's own classes: the defect first, then its absence. One interpreter, because patches leak."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def probe(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What real_probe.py saw. pdserve's entry points are put on the path, as an installation of it does."""
    site = tmp_path_factory.mktemp("site")
    metadata = site / "pdserve-0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: pdserve\nVersion: 0\n")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [
        f"[{group}]\n{name} = {value}"
        for group, names in project["entry-points"].items()
        for name, value in names.items()
    ]
    (metadata / "entry_points.txt").write_text("\n".join(lines) + "\n")
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PDSERVE_", "VLLM_PLUGINS"))}
    done = subprocess.run(
        [sys.executable, "-m", "tests.patches.real_probe"],
        cwd=ROOT,
        env={**env, "PYTHONPATH": f"{ROOT}{os.pathsep}{site}", "VLLM_LOGGING_LEVEL": "ERROR"},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("pdserve patches active: ") == 1
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def test_mooncake_reports_statistics_but_registers_no_metrics(probe: dict[str, Any]) -> None:
    (registered,) = probe["registered"]
    assert "Nixl" in registered


def test_without_the_patch_its_first_statistics_are_fatal(probe: dict[str, Any]) -> None:
    assert probe["before"]["observe"].startswith("AssertionError: MooncakeConnector is not contained")


def test_with_the_patch_they_are_dropped_counted_and_the_others_observed(probe: dict[str, Any]) -> None:
    assert probe["after"]["observe"] == "ok"
    assert probe["seen"] == [[{"transfers": 2}, 7]]
    assert probe["dropped"] == 1


def test_without_the_patch_mooncake_cannot_ask_for_its_device(probe: dict[str, Any]) -> None:
    if probe["accelerator"]:
        pytest.skip("this machine has an accelerator")
    assert probe["before"]["device"].startswith("RuntimeError: Cannot access accelerator device")


def test_with_the_patch_it_can_ask_for_and_set_its_device(probe: dict[str, Any]) -> None:
    assert probe["after"]["device"] == "ok"
    assert probe["after"]["set_device"] == "ok"
