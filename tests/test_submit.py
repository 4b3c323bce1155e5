"""What is submitted to Slurm, what is only printed, what a stop while `sbatch` answers does, and the exit codes."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pdserve.cli.commands import app
from pdserve.cli.run import run_
from pdserve.errors import CommandError, ReportedError
from pdserve.operations.submit import Submission, submit_and_follow
from pdserve.plan.node import Srun
from tests.doctor import kit
from tests.launch.deployment import LINE_SECONDS, Command, recipe, wait_until
from tests.plan.golden import ROOT
from tests.tables import each_row
from tests.test_slurm_job import RUNNING, set_answer, tools

pytestmark = pytest.mark.process

RECIPE = ROOT / "recipes" / "tiny-cpu.yaml"
SCRIPTED = ("python", "-c", "print('a b')")
__all__ = ["tools"]


def run(*command: str) -> None:
    run_(RECIPE, list(command), slurm=True, set_=["timeouts.stop_seconds=40"])


def job_that_ended(tools: Path, state: str, code: str) -> None:
    output = tools / "job.out"
    output.write_text("the command prints\n")
    set_answer(tools, "sbatch", "1\n")
    text = RUNNING.replace("JobState=RUNNING", f"JobState={state}").replace("ExitCode=0:0", f"ExitCode={code}")
    set_answer(tools, "scontrol", text.replace("StdOut=/shared/pdserve-1.out", f"StdOut={output}"))


@pytest.fixture(autouse=True)
def _own_home(pdserve_home: Path) -> None:
    """No deployment of the machine is seen."""


def test_the_whole_run_is_submitted_and_its_output_shown(tools: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job_that_ended(tools, "COMPLETED", "0:0")
    run(*SCRIPTED)
    script = (tools / "sbatch.stdin").read_text()
    assert f"set -- {RECIPE} --set timeouts.stop_seconds=40 -- python -c " in script
    assert '"$pdserve" run "$@" &' in script
    assert "the command prints\n" in capsys.readouterr().out


@each_row("state, code, expected", [
    ("FAILED", "3:0", 3), ("FAILED", "205:0", 205), ("CANCELLED", "0:15", 143), ("TIMEOUT", "0:0", 205),
])  # fmt: skip
def test_the_exit_code_is_that_of_the_run_in_the_job(tools: Path, state: str, code: str, expected: int) -> None:
    job_that_ended(tools, state, code)
    with pytest.raises(ReportedError) as ended:
        run("true")
    assert ended.value.exit_code == expected
    assert f"job 1 ended: {state.lower()}; its output: {tools / 'job.out'}" in ended.value.render()


def test_what_sbatch_refuses_has_a_code_that_is_not_the_commands(tools: Path) -> None:
    set_answer(tools, "sbatch", err="sbatch: error: invalid partition specified: nope\n", code=1)
    with pytest.raises(ReportedError, match="invalid partition") as refused:
        run("true")
    assert refused.value.exit_code == 203


def test_dry_it_prints_the_script_and_submits_nothing(tools: Path) -> None:
    result = CliRunner().invoke(app, ["run", str(RECIPE), "--slurm", "--dry-run", "--", *SCRIPTED])
    assert result.exit_code == 0
    assert result.stdout.startswith("#!/usr/bin/env bash\n")
    assert "#SBATCH --nodes=1\n" in result.stdout
    assert not (tools / "sbatch.argv").exists()


def test_slurm_and_another_place_contradict_each_other() -> None:
    result = CliRunner().invoke(app, ["run", str(RECIPE), "--slurm", "--this-machine", "--", "true"])
    assert result.exit_code == 202
    assert "give one of the two" in re.sub(r"\s+", " ", result.output)


def test_dry_on_this_machine_it_prints_plan_and_command() -> None:
    result = CliRunner().invoke(app, ["run", str(RECIPE), "--dry-run", "--", *SCRIPTED])
    assert result.exit_code == 0
    assert "run_prefill_0() {" in result.stdout
    assert result.stdout.endswith("#   python -c 'print('\"'\"'a b'\"'\"')'\n")


def test_dry_too_a_program_that_is_not_there_is_refused() -> None:
    result = CliRunner().invoke(app, ["run", str(RECIPE), "--dry-run", "--", "no-such-program"])
    assert isinstance(result.exception, CommandError)
    assert result.exception.exit_code == 127


CANCELLED = "JobId=7 JobState=CANCELLED Reason=None NodeList=(null) ExitCode=0:15 StdOut=/nowhere/7.out Power="


@pytest.fixture
def slow_tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
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


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGHUP])
def test_the_job_is_cancelled(tmp_path: Path, pdserve_home: Path, slow_tools: Path, signum: signal.Signals) -> None:
    command = Command("up", recipe(tmp_path), "--slurm")
    wait_until("sbatch runs", (slow_tools / "begun").exists, LINE_SECONDS)
    os.killpg(command.popen.pid, signum)  # as a terminal does: to all of its foreground
    (slow_tools / "go").write_text("\n")
    assert command.finish() == 130, command.output
    assert (slow_tools / "cancelled").read_text() == "7\n"
    assert "cancelled job 7" in command.output


def test_what_may_have_been_taken_is_named(tmp_path: Path, pdserve_home: Path, slow_tools: Path) -> None:
    late = "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation"
    script = (slow_tools / "sbatch").read_text().replace("echo 7", f"echo '{late}' >&2\nexit 1")
    (slow_tools / "sbatch").write_text(script)
    command = Command("up", recipe(tmp_path), "--slurm")
    wait_until("sbatch runs", (slow_tools / "begun").exists, LINE_SECONDS)
    command.interrupt()
    (slow_tools / "go").write_text("\n")
    assert command.finish() == 3, command.output
    assert "squeue --me" in command.output


ENDPOINT = "http://127.0.0.1:8000"
READY = f"test is ready at {ENDPOINT}/v1\n"


def test_the_endpoint_is_shown_where_the_record_is_earlier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planned = kit.plan()
    in_job = tuple(node.model_copy(update={"reach": Srun(job="1", kill_wait=30)}) for node in planned.nodes)
    up = {"event": "up", "endpoint": ENDPOINT}
    kit.run_dir(tmp_path, events=[up], phase="ready", plan_of_it=planned.model_copy(update={"nodes": in_job}))
    output, programs = tmp_path / "job.out", tmp_path / "bin"
    output.write_text("starts\n")
    programs.mkdir()
    job = f"JobId=1 JobState=RUNNING Reason=None NodeList=n0 ExitCode=0:0 StdOut={output} Power="
    for name, answer in {"sbatch": "1", "scontrol": job}.items():
        (programs / name).write_text(f"#!/bin/sh\ncat >/dev/null\necho '{answer}'\n")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("PDSERVE_HOME", str(tmp_path / "home"))

    shown: list[str] = []
    submit_and_follow(Submission("test", "#!/bin/sh\n"), shown.append, detach=True)
    text = "".join(shown)
    assert READY in text
    assert text.index(READY) < text.index("next: pdserve status")
