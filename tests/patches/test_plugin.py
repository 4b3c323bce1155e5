"""What vLLM's plugin call does in a process, each case in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pdserve.patches.record import read_records

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[2]
STAND_IN = """
import sys
from pdserve.patches import loader, plugin, registry
from pdserve.patches.verdict import Verdict
import dataclasses
applied = []
loader.judge = lambda patch, versions, **_: Verdict("apply", "known code")
registry.REGISTRY = tuple(
    dataclasses.replace(patch, apply=lambda name=patch.name: applied.append(name)) for patch in registry.REGISTRY
)
plugin.load()
plugin.load()
print(applied)
"""


def run(code: str, *args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("PDSERVE_")}
    return subprocess.run(
        [sys.executable, "-c", code, *args],
        env={**env, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("environment", [{}, {"PDSERVE_PATCHES": " , "}])
def test_it_is_inert_in_a_process_that_is_not_ours(environment: dict[str, str], tmp_path: Path) -> None:
    code = "import sys; from pdserve.patches.plugin import load; load(); print({'pydantic', 'vllm'} & set(sys.modules))"
    done = run(code, **environment, PDSERVE_PATCH_RECORD=str(tmp_path))
    assert (done.returncode, done.stdout, done.stderr) == (0, "set()\n", "")
    assert list(tmp_path.iterdir()) == []


def test_exactly_the_named_patches_are_applied_once_and_reported_once(tmp_path: Path) -> None:
    folder = tmp_path / "patches"
    names = ["mooncake-cpu-device", "multiconnector-prom-metrics"]
    done = run(STAND_IN, PDSERVE_PATCHES=",".join(names), PDSERVE_PATCH_RECORD=str(folder))
    assert done.stdout.splitlines()[0] == str(names), done.stderr
    assert done.stderr.count(f"pdserve patches active: {', '.join(names)} (pid ") == 1
    (path,) = folder.iterdir()
    record = json.loads(path.read_text())
    assert path.name == f"{record['pid']}.json"
    assert record["active"] == names
    assert record["session"] == os.getsid(0)
    assert set(record["versions"]) >= {"vllm", "lmcache", "mooncake", "nixl"}


def test_a_process_that_cannot_leave_its_record_ends_and_names_the_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "patches"
    done = run(STAND_IN, PDSERVE_PATCHES="mooncake-cpu-device", PDSERVE_PATCH_RECORD=str(folder))
    assert done.returncode != 0
    assert f"StartError: this process cannot report its patches in {folder}" in done.stderr


def test_a_forked_child_leaves_a_record_under_its_own_name(tmp_path: Path) -> None:
    code = """
import multiprocessing, pathlib, sys, threading
from pdserve.patches import effects
from pdserve.patches.record import Publisher, PatchStanding
folder = pathlib.Path(sys.argv[1])
Publisher(PatchStanding(active=["a"]), str(folder)).start()
effects.count("a", "seen")
def child():
    effects.count("a", "seen", 2)
    pause = threading.Event()
    while len(list(folder.glob("*.json"))) < 2: pause.wait(0.01)
child = multiprocessing.get_context("fork").Process(target=child, name="EngineCore")
child.start(); child.join(20)
"""
    done = run(code, str(tmp_path))
    assert done.returncode == 0, done.stderr
    records = {record.process: record for record in read_records(tmp_path)}
    assert records["EngineCore"].kind == "engine-core"
    assert records["EngineCore"].effects == {"a": {"seen": 2}}
    assert len(list(tmp_path.glob("*.json"))) == 2


def test_unknown_code_leaves_a_patch_out_without_which_traffic_is_served(tmp_path: Path) -> None:
    unknown = STAND_IN.replace('"apply", "known code"', '"unknown", "it is another one"')
    done = run(unknown, PDSERVE_PATCHES="mooncake-sends", PDSERVE_PATCH_RECORD=str(tmp_path))
    assert (done.returncode, done.stdout.splitlines()[0]) == (0, "[]"), done.stderr
    assert "WARNING: pdserve patch mooncake-sends is left out: it is another one; clients that leave" in done.stderr
    (path,) = tmp_path.glob("*.json")
    assert list(json.loads(path.read_text())["skipped"]) == ["mooncake-sends"]


def test_a_failed_check_ends_the_process() -> None:
    code = """
import sys, types
torch = types.ModuleType("torch")
torch.accelerator = types.ModuleType("torch.accelerator")
torch.accelerator.current_device_index = lambda device: device
sys.modules["torch"] = torch
from pdserve.patches.plugin import load
load()
"""
    done = run(code, PDSERVE_PATCHES="mooncake-cpu-device")
    assert done.returncode == 1
    last = done.stderr.rstrip().splitlines()[-1]
    assert last.startswith("pdserve.errors.StartError: patch mooncake-cpu-device does not know this upstream code")
    assert "torch.accelerator.current_device_index" in last
    assert "allow_unknown_upstream: [mooncake-cpu-device]" in last
    assert "patches active" not in done.stderr
