"""A job as a login node sees it: what Slurm's tools print (22.05, recorded), and who sees which of its variables."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdserve.errors import PreflightError, StateError
from pdserve.reach.slurm import Job, gpus_asked_per_node, look, srun_environment, submit, without_slurm
from tests.tables import each_row

pytestmark = pytest.mark.process

RUNNING = (
    "JobId=1 JobName=fake UserId=root(0) GroupId=root(0) MCS_label=N/A Priority=4294901759 Nice=0 Account=(null) "
    "QOS=(null) JobState=RUNNING Reason=None Dependency=(null) Requeue=0 Restarts=0 BatchFlag=1 Reboot=0 ExitCode=0:0 "
    "RunTime=00:00:04 TimeLimit=365-00:00:00 ReqNodeList=(null) ExcNodeList=(null) NodeList=pda[0-1] BatchHost=pda0 "
    "NumNodes=2 StdErr=/shared/pdserve-1.out StdIn=/dev/null StdOut=/shared/pdserve-1.out Power="
)


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`scontrol` and `sbatch` that say what files hold, and keep what they were given."""
    for name in ("scontrol", "sbatch"):
        program = tmp_path / name
        program.write_text(
            f'#!/bin/sh\necho "$@" >{tmp_path}/{name}.argv\ncat >{tmp_path}/{name}.stdin\n'
            f"cat {tmp_path}/{name}.out\ncat {tmp_path}/{name}.err >&2\nexit $(cat {tmp_path}/{name}.code)\n"
        )
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return tmp_path


def set_answer(tools: Path, name: str, out: str = "", err: str = "", code: int = 0) -> None:
    for kind, text in (("out", out), ("err", err), ("code", str(code))):
        (tools / f"{name}.{kind}").write_text(text)


def looked() -> Job:
    job = look("1")
    assert job is not None
    return job


def test_a_running_job(tools: Path) -> None:
    set_answer(tools, "scontrol", RUNNING.replace("StdOut=/shared/", "StdOut=/shared/my runs/of today/"))
    job = looked()
    assert (job.state, job.over, job.exit_code) == ("RUNNING", False, 0)
    assert job.output == Path("/shared/my runs/of today/pdserve-1.out")
    assert str(job) == "job 1: running on pda[0-1]"
    assert (tools / "scontrol.argv").read_text().strip() == "show job --oneliner 1"


@each_row("state, code, expected", [
    ("FAILED", "4:0", 4), ("CANCELLED", "0:15", 143), ("NODE_FAIL", "0:9", 137), ("COMPLETED", "0:0", 0),
])  # fmt: skip
def test_the_end_of_a_job_gives_the_exit_code(tools: Path, state: str, code: str, expected: int) -> None:
    text = RUNNING.replace("JobState=RUNNING", f"JobState={state}").replace("ExitCode=0:0", f"ExitCode={code}")
    set_answer(tools, "scontrol", text)
    job = looked()
    assert (job.over, job.exit_code) == (True, expected)


def test_a_waiting_job_is_reported_with_its_reason(tools: Path) -> None:
    text = RUNNING.replace("JobState=RUNNING Reason=None", "JobState=PENDING Reason=Resources")
    set_answer(tools, "scontrol", text.replace("NodeList=pda[0-1]", "NodeList=(null)"))
    assert str(looked()) == "job 1: pending (Resources)"


def test_without_the_controller_job_and_gpus_are_unknown(tools: Path) -> None:
    words = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"
    set_answer(tools, "scontrol", "TresPerNode=gres:gpu:2", err=f"{words}\n", code=1)
    assert look("1") is None
    assert gpus_asked_per_node("1") is None


def test_a_job_that_slurm_has_forgotten_is_an_error(tools: Path) -> None:
    set_answer(tools, "scontrol", err="slurm_load_jobs error: Invalid job id specified\n", code=1)
    with pytest.raises(StateError, match="job 99") as caught:
        look("99")
    assert "Invalid job id" in str(caught.value.cause)


@each_row("fields, gpus", [
    ("TresPerNode=gres:gpu:2", 2), ("TresPerNode=gres:gpu ", 1), ("TresPerNode=gres:gpu:a100:4 ", 4),
    ("TresPerNode=gres/gpu:a100=8 ", 8),  # as written from 23.02 on
    ("TresPerNode=gres:gpu:a100:4,gres:craynetwork:1,gres:gpu:v100:2 ", 6), ("TresPerNode=gres:gpu_mem:80 ", None),
    ("TresPerJob=gres:gpu:16 ", None), ("", None),
])  # fmt: skip
def test_gpus_that_a_job_has_asked_for_on_each_node(tools: Path, fields: str, gpus: int | None) -> None:
    set_answer(tools, "scontrol", f"{RUNNING} {fields}")
    assert gpus_asked_per_node("1") == gpus
    assert (tools / "scontrol.argv").read_text().strip() == "show job --oneliner 1"


def test_submitting_gives_the_script_on_stdin_and_returns_the_id(tools: Path) -> None:
    set_answer(tools, "sbatch", "17;cluster2\n")
    assert submit("#!/bin/bash\nexit 0\n") == "17"
    assert (tools / "sbatch.argv").read_text().strip() == "--parsable"
    assert (tools / "sbatch.stdin").read_text() == "#!/bin/bash\nexit 0\n"


def test_what_sbatch_refuses_is_reported_in_its_own_words(tools: Path) -> None:
    set_answer(tools, "sbatch", err="sbatch: error: invalid partition specified: nope\n", code=1)
    with pytest.raises(PreflightError) as caught:
        submit("#!/bin/bash\n")
    assert "invalid partition" in str(caught.value.cause)


def test_without_slurm_it_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(PreflightError) as caught:
        submit("#!/bin/bash\n")
    assert "no sbatch on this machine's PATH" in caught.value.what
    assert "module load slurm" in str(caught.value.cause)


INSIDE_A_JOB = {
    "PATH": "/usr/bin", "SLURM_CONF": "/etc/slurm.conf", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[0-1]",
    "SLURM_NTASKS_PER_NODE": "1", "SLURM_CPU_BIND": "verbose", "SLURM_PROCID": "0", "SRUN_CPUS_PER_TASK": "4",
    "SBATCH_REQUEUE": "1", "PMI_RANK": "3", "PMIX_RANK": "3", "CUDA_VISIBLE_DEVICES": "0,1",
    "MY_SLURM_SCRIPT": "stays",
}  # fmt: skip


def test_our_srun_obeys_no_inherited_option_and_engines_do_not_take_slurms_ranks_for_theirs() -> None:
    both = {"PATH": "/usr/bin", "CUDA_VISIBLE_DEVICES": "0,1", "MY_SLURM_SCRIPT": "stays"}
    assert srun_environment(INSIDE_A_JOB) == {**both, "SLURM_CONF": "/etc/slurm.conf"}
    assert without_slurm(INSIDE_A_JOB) == {**both, "SLURM_JOB_ID": "7"}
