"""`pdserve preflight` as a user runs it."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from pdserve.plan.model import Plan
from pdserve.preflight.finding import Finding
from tests.launch.deployment import pdserve, read_json, recipe, up

pytestmark = pytest.mark.process


def test_a_machine_that_has_everything(tmp_path: Path, pdserve_home: Path) -> None:
    code, output = pdserve("preflight", recipe(tmp_path))
    assert code == 0, output
    assert "ok: ports on" in output
    assert "ok: model on" in output
    assert "failed" not in output
    assert not pdserve_home.exists(), "nothing was started or recorded"


def test_everything_that_is_missing_with_its_line_and_its_fix(tmp_path: Path, pdserve_home: Path) -> None:
    file = recipe(tmp_path)
    (tmp_path / "model" / "config.json").unlink()
    plan = Plan.model_validate(read_json(pdserve("render", file, "--json")[1]))
    with socket.create_server(("127.0.0.1", plan.process("decode-0").ports["http"])):
        code, output = pdserve("preflight", file, "--set", "lmcache.l1_size_gb=900000")
    lines = output.splitlines()
    assert code == 3
    assert [line.split(" on ")[0] for line in lines if line.startswith("failed")] == [
        "failed: model",
        "failed: ports",
        "failed: memory",
    ]
    line = next(n for n, text in enumerate(file.read_text().splitlines(), 1) if "path:" in text)
    assert f"{file}:{line}" in lines[0]
    assert "--set lmcache.l1_size_gb=900000: LMCache's L1 needs 900000.0 GiB of memory" in output
    assert any(line.startswith("  | decode-0 needs port") for line in lines)
    assert "3 failed" in lines[-1]


def test_what_the_plan_warns_of_is_a_finding(tmp_path: Path, pdserve_home: Path) -> None:
    code, output = pdserve("preflight", recipe(tmp_path, status="untested"), "--json")
    assert code == 0, output
    [warning] = [finding for finding in map(Finding.model_validate, json.loads(output)) if finding.check == "plan"]
    assert (warning.status, warning.value) == ("warning", "the recipe fake is untested on the hardware that it names")


def test_of_a_running_deployment(tmp_path: Path, pdserve_home: Path) -> None:
    file = recipe(tmp_path)
    with up(file, pdserve_home) as deployment:
        deployment.wait_for("phase", phase="ready")
        code, output = pdserve("preflight", file)
    assert code == 8
    assert "fake is running" in output
