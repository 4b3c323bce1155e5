"""`pdserve run --slurm` and `--dry-run`: what is submitted, what is only printed, and which exit code it ends with."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pdserve.cli.commands import app
from pdserve.cli.up import run_in_slurm
from pdserve.errors import CommandError, ReportedError
from tests.plan.golden import ROOT
from tests.test_slurm_job import RUNNING, set_answer, tools

pytestmark = pytest.mark.process

RECIPE = ROOT / "recipes" / "tiny-cpu.yaml"
SCRIPTED = ("python", "-c", "print('a b')")
__all__ = ["tools"]


def run(*command: str) -> None:
    run_in_slurm(RECIPE, command, ["timeouts.stop_seconds=40"], [], cluster=None, this_machine=False, dry=False)


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


@pytest.mark.parametrize(
    ("state", "code", "expected"),
    [("FAILED", "3:0", 3), ("FAILED", "205:0", 205), ("CANCELLED", "0:15", 143), ("TIMEOUT", "0:0", 205)],
    ids=["the command's", "pdserve's own", "cancelled", "the time limit"],
)
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


@pytest.mark.parametrize("option", [["--cluster", "hosts.yaml"], ["--this-machine"]])
def test_slurm_and_another_place_contradict_each_other(option: list[str]) -> None:
    result = CliRunner().invoke(app, ["run", str(RECIPE), "--slurm", *option, "--", "true"])
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
