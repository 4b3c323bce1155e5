"""A stop while `sbatch` answers: `up --slurm` waits for the job's id and cancels it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.launch.deployment import LINE_SECONDS, Command, recipe, wait_until

pytestmark = pytest.mark.process

CANCELLED = "JobId=7 JobState=CANCELLED Reason=None NodeList=(null) ExitCode=0:15 StdOut=/nowhere/7.out Power="


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Slurm's. `sbatch` notes that it runs, and answers once the test has written to its pipe."""
    programs = tmp_path / "bin"
    programs.mkdir()
    os.mkfifo(programs / "go")
    scripts = {
        "sbatch": f"cat >/dev/null\ntouch {programs}/begun\nread go <{programs}/go\necho 7",
        "scontrol": f"echo '{CANCELLED}'",
        "scancel": f'echo "$@" >>{programs}/cancelled',
    }
    for name, script in scripts.items():
        (programs / name).write_text(f"#!/bin/sh\n{script}\n")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    return programs


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_job_is_cancelled(tmp_path: Path, pdserve_home: Path, tools: Path, signum: signal.Signals) -> None:
    command = Command("up", recipe(tmp_path), "--slurm")
    wait_until("sbatch runs", (tools / "begun").exists, LINE_SECONDS)
    os.killpg(command.popen.pid, signum)  # as a terminal does: to all of its foreground
    (tools / "go").write_text("\n")
    assert command.finish() == 130, command.output
    assert (tools / "cancelled").read_text() == "7\n"
    assert "cancelled job 7" in command.output


def test_what_may_have_been_taken_is_named(tmp_path: Path, pdserve_home: Path, tools: Path) -> None:
    late = "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation"
    script = (tools / "sbatch").read_text().replace("echo 7", f"echo '{late}' >&2\nexit 1")
    (tools / "sbatch").write_text(script)
    command = Command("up", recipe(tmp_path), "--slurm")
    wait_until("sbatch runs", (tools / "begun").exists, LINE_SECONDS)
    command.interrupt()
    (tools / "go").write_text("\n")
    assert command.finish() == 3, command.output
    assert "squeue --me" in command.output
