"""`pdserve eval` as typed, over a deployment of fakes and a stand-in for the harness."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.deployment import (
    REPOSITORY,
    Command,
    Deployment,
    home_in,
    pdserve,
    read_json,
    recipe,
    serving,
    until,
    up,
)

pytestmark = pytest.mark.process


@pytest.fixture
def harness(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An executable, as a user names it with --harness."""
    program = tmp_path / "lm_eval"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} {REPOSITORY}/tests/evaluation/harness_stand_in.py "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("FAKE_RUNS", str(tmp_path / "runs"))
    return program


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    folder = tmp_path_factory.mktemp("eval")
    with home_in(folder) as home, up(recipe(folder), home) as deployment:
        yield serving(deployment)


def test_a_score_is_the_mean_of_its_repeats(fake: Deployment, harness: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_SCORES", "0.5,1")
    code, output = pdserve("eval", "capitals", "--threshold", "0.75", "--repeats", "2", "--harness", harness, "--json")
    assert code == 0, output
    verdict = read_json(output)
    assert (verdict["scores"], verdict["mean"], verdict["questions"], verdict["passed"]) == ([0.5, 1.0], 0.75, 4, True)
    folder = Path(verdict["folder"])
    assert json.loads((folder / "verdict.json").read_text()) == verdict
    assert sorted(path.name for path in folder.iterdir()) == ["repeat-1", "repeat-2", "verdict.json"]
    key = fake.run.read_key()
    assert not [path for path in folder.rglob("*") if path.is_file() and key in path.read_text()]


def test_a_score_below_the_threshold_fails(fake: Deployment, harness: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_SCORES", "0.5")
    code, output = pdserve("eval", "capitals", "--threshold", "0.75", "--harness", harness)
    assert code == 6, output
    assert "exact_match,none is 0.5000, at least 0.75 was asked for" in output


def test_a_harness_that_fails_is_no_score(fake: Deployment, harness: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_EXIT", "1")
    code, output = pdserve("eval", "nothing", "--threshold", "0", "--harness", harness)
    assert code == 7, output
    assert "the harness exited with code 1, and there is no score" in output
    assert "| ValueError: Tasks not found: nothing" in output
    assert "/repeat-1/harness.log" in output


def test_a_harness_whose_python_is_gone_cannot_be_started(fake: Deployment, tmp_path: Path) -> None:
    harness = tmp_path / "lm_eval"
    harness.write_text(f"#!{tmp_path}/gone/python\n")
    harness.chmod(0o755)
    code, output = pdserve("eval", "capitals", "--threshold", "0", "--harness", harness)
    assert code == 3, output
    assert "the harness cannot be started: No such file" in output
    assert "first line" in output


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_that_ends_it_ends_the_harness(
    fake: Deployment, harness: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, signum: signal.Signals, code: int
) -> None:
    """That it is gone is checked at the end of every test."""
    started = tmp_path / "started"
    monkeypatch.setenv("FAKE_HANGS", str(started))
    command = Command("eval", "capitals", "--threshold", "0", "--harness", harness)
    until(started.exists)
    command.popen.send_signal(signum)
    assert command.finish() == code


@pytest.mark.parametrize(("task", "message"), [("missing.yaml", "there is no task file"), ("present.yml", "mv ")])
def test_a_task_file_that_cannot_be_read(tmp_path: Path, pdserve_home: Path, task: str, message: str) -> None:
    (tmp_path / "present.yml").write_text("task: present\n")
    code, output = pdserve("eval", tmp_path / task, "--threshold", "1", "--harness", "/bin/true")
    assert code == 2, output
    assert message in output


def test_without_a_deployment_the_harness_is_not_asked_for(pdserve_home: Path) -> None:
    code, output = pdserve("eval", "capitals", "--threshold", "0.75", "--harness", "/no/such/program")
    assert code == 8, output
    assert "there is no program" not in output
