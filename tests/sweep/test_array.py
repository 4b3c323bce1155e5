"""A sweep as job arrays: which tasks there are, the script, and what is said of a task that has left points behind."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pdserve.cli.commands import app
from pdserve.errors import PreflightError, RecipeError, StateError
from pdserve.plan.sbatch import render_arrays
from pdserve.reach.slurm import SlurmTask, stop_array, tasks_in
from pdserve.sweep.file import by_deployment, letters, load_sweep, resolve, select_deployment
from pdserve.sweep.record import (
    ArrayRecord,
    SweepFolder,
    hold_name,
    record_task,
    task_of,
    write_array,
)
from pdserve.sweep.slurm import check_none_runs, list_unfinished, scripts, submit_arrays
from tests.sweep.array_golden import FILE, array_script, member
from tests.sweep.kit import CROSS, RECIPE, SWEEP, planned, record
from tests.tables import each_row


def test_the_script_has_a_task_for_each_deployment_and_is_as_it_was_read() -> None:
    assert FILE.read_text() == array_script(), "python -m tests.regenerate, and read the diff"


def test_deployments_of_other_sizes_are_in_arrays_of_their_own(tmp_path: Path) -> None:
    """17 instances of a GPU each need three nodes of eight."""
    made = planned(tmp_path, "cross:\n  decode.instances: [1, 2, 17]\n")
    arrays = scripts(made, made.points, ["s.yaml"], at_once=None)
    assert [(array.nodes, len(array.members)) for array in arrays] == [(1, 2), (3, 1)]
    assert "#SBATCH --nodes=3\n" in arrays[1].script
    assert "#SBATCH --array=0-1\n" in arrays[0].script
    assert "#SBATCH --array=0-0\n" in arrays[1].script


def test_a_deployment_without_points_to_run_is_no_task(tmp_path: Path) -> None:
    made = planned(tmp_path)
    (_, first), (deployment, second) = by_deployment(made.points)
    (array,) = scripts(made, [second[1]], ["s.yaml"], at_once=None)
    assert [member.id for member in array.members] == [deployment.digest]
    assert first[0].deployment.digest not in array.script
    assert scripts(made, [], ["s.yaml"], at_once=None) == ()


def test_an_array_of_the_recipe_itself_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="pdserve sets --array"):
        planned(tmp_path, text=RECIPE + 'slurm: {options: ["--array=1-4"]}\n')


@pytest.mark.process
@pytest.mark.parametrize(("number", "code", "said"), [("1", 0, "--only bbbb"), (None, 1, "submit it with sbatch")])
def test_a_task_runs_the_deployment_of_its_number(tmp_path: Path, number: str | None, code: int, said: str) -> None:
    (array,) = render_arrays([member("aaaa"), member("bbbb")], ["/a b/s.yaml", "--retry"], name="load")
    (tmp_path / "pdserve").write_text('#!/bin/sh\nprintf "%s|" "$@"\necho "$@"\n')
    (tmp_path / "pdserve").chmod(0o755)
    environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_SUBMIT_DIR": str(tmp_path)}
    environ |= {} if number is None else {"SLURM_ARRAY_TASK_ID": number}
    done = subprocess.run(
        ["bash"], input=array.script, env=environ, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode == 0) == (code == 0), done.stderr
    assert said in done.stdout + done.stderr
    assert code or done.stdout.startswith("sweep|/a b/s.yaml|--retry|--only|bbbb|")


def test_a_deployment_alone_has_a_name_of_its_own_and_the_points_of_the_sweep(tmp_path: Path) -> None:
    made = planned(tmp_path)
    (first, its_points), _ = by_deployment(made.points)
    part = select_deployment(made, first.digest, {})
    assert part.name == f"small-{first.digest[:6]}"
    assert [point.id for point in part.points] == [point.id for point in its_points]
    with pytest.raises(RecipeError, match="no such deployment"):
        select_deployment(made, "0" * 12, {})


def test_a_job_in_the_name_of_a_recipe_is_none_in_that_of_the_folder(tmp_path: Path) -> None:
    """Else each job would measure all of it anew, and nobody would see what its tasks have measured."""
    (tmp_path / "s.yaml").write_text(SWEEP + CROSS)
    (tmp_path / "r.yaml").write_text(RECIPE.replace("name: small", "name: small-${SLURM_JOB_ID:-local}", 1))
    outside, first, second = (
        resolve(load_sweep(tmp_path / "s.yaml"), {} if job is None else {"SLURM_JOB_ID": job})
        for job in (None, "77", "78")
    )
    assert [each.name for each in (outside, first, second)] == ["small-local", "small-77", "small-78"]
    assert {each.folder_name for each in (outside, first, second)} == {"small-local"}
    deployment = first.points[0].deployment.digest
    assert select_deployment(first, deployment, {"SLURM_JOB_ID": "77"}).name == f"small-77-{deployment[:6]}"


def test_the_script_goes_to_stdout_after_the_plan_and_nothing_is_written(tmp_path: Path, pdserve_home: Path) -> None:
    planned(tmp_path)
    result = CliRunner().invoke(app, ["sweep", str(tmp_path / "s.yaml"), "--slurm", "--dry-run", "--at-once", "1"])
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("#!/usr/bin/env bash\n")
    assert "#SBATCH --array=0-1%1\n" in result.stdout
    assert "to run: 4 points on 4 starts" in result.stderr
    assert "task 0 = A, 1 = B" in result.stderr
    assert not (pdserve_home / "small").exists()


@each_row("words, said", [
    (["--at-once", "2"], "--at-once belongs to --slurm"),
    (["--detach"], "--detach belongs to --slurm"),
    (["--slurm", "--only", "abc"], "give one of the two"),
    (["--slurm", "--this-machine"], "give one of the two"),
    (["--only", "abc"], "no such deployment"),
])  # fmt: skip
def test_options_that_contradict_each_other_are_refused(tmp_path: Path, words: list[str], said: str) -> None:
    planned(tmp_path)
    result = CliRunner().invoke(app, ["sweep", str(tmp_path / "s.yaml"), *words])
    assert result.exit_code != 0
    assert said in re.sub(r"\s+", " ", result.output + str(result.exception))


# The records of tasks


def test_a_name_is_of_one_sweep_at_a_time_whatever_its_deployments_are(tmp_path: Path) -> None:
    job = {"SLURM_JOB_ID": "14"}
    with hold_name(tmp_path, "small", job):
        with pytest.raises(StateError) as raised, hold_name(tmp_path, "small", {}):
            pass
        assert "small is measured by another sweep now" in raised.value.render()
        assert "job 14 on " in raised.value.render()
        with hold_name(tmp_path, "small-aaaaaa", {}):
            pass
    with hold_name(tmp_path, "small", {}):
        pass


def test_a_task_that_has_left_points_behind_is_named_with_job_log_and_reason(tmp_path: Path) -> None:
    made, folder = planned(tmp_path), SweepFolder(tmp_path / "sweep")
    (first, its_points), (second, _) = by_deployment(made.points)
    names = letters(made.points)
    assert list_unfinished(made, folder, names, {}) == [], "nothing was tried"
    write_array(folder, ArrayRecord(job="12", deployments=(first.digest, second.digest), submitted=1.0))
    folder.write(its_points[0], record(its_points[0], 1.0))
    with pytest.raises(KeyboardInterrupt), record_task(folder, first.digest, {"SLURM_JOB_ID": "12"}):
        raise KeyboardInterrupt
    mine = task_of(folder, first.digest)
    assert mine is not None
    write = mine.model_copy(update={"job": "12_0", "log": "/jobs/12_0.out"})
    (folder.path / "tasks" / f"{first.digest}.json").write_text(write.model_dump_json())
    states = {
        "12_0": SlurmTask("TIMEOUT", "None", 0, Path("/jobs/12_0.out"), number=0),
        "12_1": SlurmTask("NODE_FAIL", "NodeDown", 137, Path("/jobs/12_1.out"), number=1),
    }
    one, other = list_unfinished(made, folder, names, states)
    assert one.startswith("A: 1 of 2 points were not measured: job 12_0 on ")
    assert "log /jobs/12_0.out; timeout; it was stopped: by Ctrl-C, scancel, or the job's time limit" in one
    assert other.startswith("B: 2 of 2 points were not measured: job 12_1; log /jobs/12_1.out; node_fail (NodeDown)")
    # Of one that failed before it wrote a record, the log has the reason.
    (tmp_path / "12_1.out").write_text("to run: 2 points\nerror: s.yaml: --only: no such deployment\n  what to do: x\n")
    failed = {"12_1": SlurmTask("FAILED", "NonZeroExitCode", 2, tmp_path / "12_1.out", number=1)}
    assert "exit code 2; s.yaml: --only: no such deployment" in list_unfinished(made, folder, names, failed)[1]


# What Slurm says


WAITING = (
    "JobId=65541 ArrayJobId=65541 ArrayTaskId=2-3,5%2 ArrayTaskThrottle=2 JobName=small-load UserId=root(0) "
    "JobState=PENDING Reason=JobArrayTaskLimit Dependency=(null) ExitCode=0:0 StdOut=/shared/my runs/pdserve-%A_%a.out "
    "Power="
)
FAILED = (
    "JobId=65542 ArrayJobId=65541 ArrayTaskId=0 ArrayTaskThrottle=2 JobName=small-load UserId=root(0) "
    "JobState=FAILED Reason=NonZeroExitCode Dependency=(null) ExitCode=12:0 StdOut=/shared/pdserve-65541_0.out Power="
)


def test_scontrol_has_a_line_for_each_task_and_one_for_those_that_wait() -> None:
    tasks = tasks_in(f"{FAILED}\n{WAITING}\n", "65541")
    assert sorted(tasks) == [0, 2, 3, 5]
    assert (tasks[0].over, tasks[0].exit_code) == (True, 12)
    assert str(tasks[0]) == "failed (NonZeroExitCode), exit code 12"
    assert str(tasks[3]) == "pending (JobArrayTaskLimit)"
    assert tasks[3].output == Path("/shared/my runs/pdserve-65541_3.out")


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`sbatch`, `scontrol` and `scancel` that keep their arguments and say what a file holds."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("sbatch", "scontrol", "scancel"):
        (folder / name).write_text(
            f'#!/bin/sh\necho "$@" >>{folder}/{name}.argv\n[ {name} = sbatch ] && cat >/dev/null\n'
            f"cat {folder}/{name}.out\ncat {folder}/{name}.err >&2\nexit $(cat {folder}/{name}.code)\n"
        )
        (folder / name).chmod(0o755)
        answer(folder, name)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return folder


def answer(tools: Path, name: str, out: str = "", err: str = "", code: int = 0) -> None:
    for kind, text in (("out", out), ("err", err), ("code", str(code))):
        (tools / f"{name}.{kind}").write_text(text)


@pytest.mark.process
def test_arrays_follow_each_other_where_there_is_a_limit(tmp_path: Path, tools: Path) -> None:
    made, folder = planned(tmp_path, "cross:\n  decode.instances: [1, 17]\n"), SweepFolder(tmp_path / "sweep")
    arrays = scripts(made, made.points, ["s.yaml"], at_once=3)
    answer(tools, "sbatch", out="41\n")
    said: list[str] = []
    submit_arrays(arrays, folder, said.append, one_after_other=True)
    assert (tools / "sbatch.argv").read_text().splitlines() == ["--parsable", "--parsable --dependency=afterany:41"]
    assert said == ["submitted job 41: 1 task of 1 node; scancel 41", "submitted job 41: 1 task of 3 nodes; scancel 41"]


@pytest.mark.process
def test_a_ctrl_c_while_sbatch_answers_cancels_all_that_is_submitted(tmp_path: Path, tools: Path) -> None:
    """Also those that are cancelled after another Ctrl-C."""
    made, folder = planned(tmp_path, "cross:\n  decode.instances: [1, 17]\n"), SweepFolder(tmp_path / "sweep")
    (tools / "sbatch").write_text(
        f"#!/bin/sh\ncat >/dev/null\necho >>{tools}/n\nn=$(wc -l <{tools}/n)\n[ $n = 1 ] || kill -INT $PPID\necho 4$n\n"
    )
    (tools / "scancel").write_text(f'#!/bin/sh\nkill -INT $PPID\necho "$@" >>{tools}/scancel.argv\n')
    said: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        submit_arrays(scripts(made, made.points, ["s.yaml"], at_once=None), folder, said.append, one_after_other=False)
    assert (tools / "scancel.argv").read_text().splitlines() == ["41", "42"]
    assert said[2:] == ["cancelled job 41", "cancelled job 42"]


@pytest.mark.process
def test_nothing_is_submitted_while_an_array_of_the_sweep_is_not_over(tmp_path: Path, tools: Path) -> None:
    folder = SweepFolder(tmp_path / "sweep")
    check_none_runs(folder)
    write_array(folder, ArrayRecord(job="65541", deployments=("aaaa",), submitted=1.0))
    answer(tools, "scontrol", out=f"{FAILED}\n{WAITING}\n")
    with pytest.raises(StateError, match="job 65541 of this sweep is not over: 3 of its tasks wait or run"):
        check_none_runs(folder)
    answer(tools, "scontrol", err="slurm_load_jobs error: Unable to contact slurm controller", code=1)
    with pytest.raises(StateError, match="controller does not answer"):
        check_none_runs(folder)
    answer(tools, "scontrol", err="slurm_load_jobs error: Invalid job id specified", code=1)
    check_none_runs(folder)
    answer(tools, "scontrol", out=FAILED)
    check_none_runs(folder)
    answer(tools, "scontrol", err="scontrol: error: no", code=1)
    with pytest.raises(StateError, match="scontrol does not show job 65541"):
        check_none_runs(folder)


@pytest.mark.process
def test_an_array_is_stopped_in_order(tools: Path) -> None:
    stop_array("41")
    assert (tools / "scancel.argv").read_text().splitlines() == ["--state=PENDING 41", "--batch --signal=TERM 41"]
    answer(tools, "scancel", err="scancel: error: Access denied", code=1)
    with pytest.raises(PreflightError, match="did not stop job 41"):
        stop_array("41")
