"""A sweep measures the deployment that it has started and no other one, and knows it again after it was killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

from pdserve.operations.current_run import find_running
from pdserve.sweep.record import SweepFolder, records_in
from tests.launch.deployment import REPOSITORY, Command, Deployment, assert_nothing_left, pdserve
from tests.sweep.test_run import python, records, starts, sweep_file

pytestmark = pytest.mark.process

__all__ = ["python"]


def measure(folder: Path, python: str, *between: Sequence[object]) -> tuple[int, str]:
    """The verb, with these commands after its first point is written and before the second is begun."""
    commands = [[sys.executable, "-m", "pdserve.cli.main", *map(str, words)] for words in between]
    program = folder / "measure.py"
    program.write_text(
        "import subprocess, sys\nfrom pdserve.cli.main import main\nfrom pdserve.sweep.record import SweepFolder\n"
        f"write, commands = SweepFolder.write, {commands!r}\n"
        "def written(self, point, record):\n"
        "    write(self, point, record)\n"
        "    while commands:\n"
        "        subprocess.run(commands.pop(0), check=True)\n"
        "SweepFolder.write = written\n"
        f"sys.argv = {['pdserve', 'sweep', '--python', python, str(folder / 'sweep.yaml')]!r}\n"
        "main()\n"
    )
    done = subprocess.run(
        [sys.executable, str(program)],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=400,
        check=False,
    )
    return done.returncode, done.stdout


def measured_recipes(home: Path) -> list[str]:
    """Of each point that was measured, the recipe of the deployment that served."""
    every = records_in(SweepFolder.of(home, "fake", "s").path)
    return [
        json.loads((folder / record.result / "result.json").read_text())["provenance"]["recipe"]
        for folder, record in every.items()
        if record.result is not None
    ]


@pytest.mark.full
def test_another_plan_is_not_the_sweeps_own(tmp_path: Path, pdserve_home: Path, python: str) -> None:
    sweep_file(tmp_path)
    replace = ("up", tmp_path / "fake.yaml", "--replace", "--set", "proxy.drain_seconds=9")
    code, output = measure(tmp_path, python, replace)
    assert code == 0, output
    assert [record.status for record in records(pdserve_home)] == ["VALID", "VALID"]
    assert not [text for text in measured_recipes(pdserve_home) if "drain_seconds: 9" in text]
    assert starts(pdserve_home) == 2
    assert "fake: another plan was applied (pdserve up on the running deployment); the next point needs a new" in output
    assert_nothing_left(Deployment(None, pdserve_home))


def test_anothers_deployment_is_left_alone(tmp_path: Path, pdserve_home: Path, python: str) -> None:
    sweep_file(tmp_path)
    try:
        code, output = measure(tmp_path, python, ("down", "fake"), ("up", "--detach", tmp_path / "fake.yaml"))
        assert code == 8, output
        assert "fake is running already" in output
        assert [record.load.concurrency for record in records(pdserve_home)] == [1]
        theirs = find_running(pdserve_home, "fake")
        assert theirs is not None
        assert not (SweepFolder.of(pdserve_home, "fake", "s").starts / theirs.run_id).exists()
    finally:
        pdserve("down", "fake")
    assert_nothing_left(Deployment(None, pdserve_home))


@pytest.mark.full
def test_an_edit_leaves_it_alone(
    tmp_path: Path, pdserve_home: Path, python: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_CLIENT", "hang")
    file = sweep_file(tmp_path)
    first = Command("sweep", "--python", python, file)
    try:
        first.expect("serving fake")
        mine = find_running(pdserve_home, "fake")
        monkeypatch.delenv("FAKE_CLIENT")
        document = yaml.safe_load((tmp_path / "fake.yaml").read_text())
        document["proxy"]["drain_seconds"] = 3
        (tmp_path / "fake.yaml").write_text(yaml.safe_dump(document, sort_keys=False))
        code, output = pdserve("sweep", "--python", python, file)
        assert code == 8, output
        assert "fake is measured by another sweep now" in output
        assert f"PID {first.popen.pid} on " in output
        now = find_running(pdserve_home, "fake")
        assert now is not None
        assert mine is not None
        assert now.run_id == mine.run_id
        assert now.read_state().phase == "ready"
    finally:
        first.interrupt()
        assert first.finish() == 130, first.output
    assert_nothing_left(Deployment(None, pdserve_home))


@pytest.mark.full
def test_a_killed_sweep_goes_on(
    tmp_path: Path, pdserve_home: Path, python: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = sweep_file(tmp_path, concurrency=[1])
    monkeypatch.setenv("FAKE_NEVER_READY", "1")
    command = Command("sweep", "--python", python, file)
    command.expect("decode-0     starting on")
    command.popen.send_signal(signal.SIGKILL)
    command.finish()
    monkeypatch.delenv("FAKE_NEVER_READY")
    try:
        assert find_running(pdserve_home, "fake") is not None, "its launcher is a process of its own"
        code, output = pdserve("sweep", "--python", python, file)
        assert code == 0, output
        assert "left by this sweep" in output
        assert [record.status for record in records(pdserve_home)] == ["VALID"]
    finally:
        pdserve("down", "fake")
    assert_nothing_left(Deployment(None, pdserve_home))


@pytest.mark.full
def test_a_hangup_stops_it(tmp_path: Path, pdserve_home: Path, python: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_NEVER_READY", "1")
    command = Command("sweep", "--python", python, sweep_file(tmp_path))
    command.expect("decode-0     starting on")
    try:
        command.popen.send_signal(signal.SIGHUP)
        assert command.finish() == 130, command.output
        assert find_running(pdserve_home, "fake") is None
    finally:
        pdserve("down", "fake")
    assert not records(pdserve_home)
    assert_nothing_left(Deployment(None, pdserve_home))
