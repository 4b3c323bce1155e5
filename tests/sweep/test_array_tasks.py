"""The tasks of an array as processes beside each other, over fake engines: each measures its own deployment, and the
record of the sweep is whole whichever ends last."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from pdserve.operations.current_run import find_running
from pdserve.report.rows import read_report
from pdserve.sweep.file import by_deployment, load_sweep
from pdserve.sweep.record import SweepFolder, records_in, task_of
from pdserve.sweep.resolve import resolve
from tests.launch.deployment import REPOSITORY, Command, Deployment, assert_nothing_left, free_ports, pdserve
from tests.sweep.test_run import python, sweep_file

pytestmark = pytest.mark.process

__all__ = ["python"]
PORTS = ("proxy", "prefill", "decode", "bootstrap")


def side_by_side(folder: Path) -> Path:
    """Two deployments that may run on one machine at once: each with ports of its own."""
    blocks = free_ports(9 + 2 * len(PORTS))[9:]
    apart = {f"ports.{kind}": [blocks[2 * place], blocks[2 * place + 1]] for place, kind in enumerate(PORTS)}
    return sweep_file(folder, zip=apart)


def ids(file: Path) -> list[str]:
    return [deployment.digest for deployment, _ in by_deployment(resolve(load_sweep(file), os.environ).points)]


def own_name(deployment: str) -> str:
    """Of a deployment that may run beside the others of its sweep."""
    return f"fake-{deployment[:6]}"


def test_tasks_beside_each_other_leave_a_whole_sweep(tmp_path: Path, pdserve_home: Path, python: str) -> None:
    file = side_by_side(tmp_path)
    first, second = ids(file)
    tasks = [
        Command(
            *("sweep", "--only", deployment, "--python", python, file),
            env={"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": str(number)},
        )
        for number, deployment in enumerate((first, second))
    ]
    ends = [task.finish() for task in tasks]
    assert ends == [0, 0], "\n".join(task.output for task in tasks)
    folder = SweepFolder.of(pdserve_home, "fake", "s")
    assert [record.status for record in records_in(folder.path).values()] == ["VALID"] * 4
    for number, deployment in enumerate((first, second)):
        record = task_of(folder, deployment)
        assert record is not None
        assert (record.job, record.error) == (f"7_{number}", None)
        assert record.ended is not None
        assert find_running(pdserve_home, own_name(deployment)) is None
    assert any("4 of 4 points are VALID" in task.output for task in tasks), "whichever ended last"
    report = read_report([folder.path])
    assert (len(report.rows), report.invalid, len(report.timelines)) == (4, 0, 2)
    code, output = pdserve("sweep", "--dry-run", file)
    assert code == 0
    assert "to run: 0 points" in output
    for deployment in (first, second):
        assert_nothing_left(Deployment(None, pdserve_home, own_name(deployment)))


@pytest.mark.full
def test_a_stopped_task_stops_its_deployment(tmp_path: Path, pdserve_home: Path, python: str) -> None:
    file = side_by_side(tmp_path)
    first, _ = ids(file)
    task = Command("sweep", "--only", first, "--python", python, file, env={"SLURM_JOB_ID": "9"})
    task.expect("concurrency 1: VALID")
    task.popen.send_signal(signal.SIGTERM)
    assert task.finish() == 130, task.output
    assert_nothing_left(Deployment(None, pdserve_home, own_name(first)))
    folder = SweepFolder.of(pdserve_home, "fake", "s")
    (done,) = records_in(folder.path).values()
    record = task_of(folder, first)
    assert record is not None
    assert record.error is not None
    assert "it was stopped" in record.error
    code, output = pdserve("sweep", "--dry-run", file)
    assert code == 0
    assert "A: 1 of 2 points were not measured: job 9 on " in output
    assert "to run: 3 points on 2 starts" in output
    code, output = pdserve("sweep", "--only", first, "--python", python, file)
    assert code == 0, output
    assert "2 of 4 points are VALID, 2 not measured" in output
    assert done in records_in(folder.path).values(), "what is whole is not measured again"


@pytest.mark.full
def test_an_array_is_followed(tmp_path: Path, pdserve_home: Path, python: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`sbatch` stands for Slurm: it runs the tasks beside each other, and scontrol says that they ended."""
    file = side_by_side(tmp_path)
    text = yaml.safe_load((tmp_path / "fake.yaml").read_text())
    (tmp_path / "fake.yaml").write_text(yaml.safe_dump(text | {"slurm": {"partition": "test"}}, sort_keys=False))
    slurm = tmp_path / "bin"
    slurm.mkdir()
    programs = {
        "pdserve": f'exec {shlex.join([sys.executable, "-m", "pdserve.cli.main"])} "$@"\n',
        "sbatch": f"cat >{slurm}/script\n"
        "for task in 0 1; do\n"
        "  SLURM_ARRAY_JOB_ID=41 SLURM_ARRAY_TASK_ID=$task bash "
        f"{slurm}/script >{slurm}/$task.out 2>&1 &\ndone\nwait\necho 41\n",
        "scontrol": "".join(
            f"echo JobId=4{task} ArrayJobId=41 ArrayTaskId={task} JobState=COMPLETED Reason=None ExitCode=0:0 "
            f"StdOut={slurm}/{task}.out Power=\n"
            for task in (0, 1)
        ),
    }
    for name, program in programs.items():
        (slurm / name).write_text(f"#!/bin/bash\n{program}")
        (slurm / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{slurm}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    code, output = _in_process(file, python, tmp_path)
    assert code == 0, output + "".join((slurm / f"{task}.out").read_text() for task in (0, 1))
    assert "submitted job 41: 2 tasks of 1 node" in output
    assert "task 41_0: completed" in output
    assert "4 of 4 points are VALID" in output
    assert len(re.findall(r"concurrency [12]: VALID", output)) == 4
    assert "#SBATCH --partition=test\n" in (slurm / "script").read_text()
    for deployment in ids(file):
        assert_nothing_left(Deployment(None, pdserve_home, own_name(deployment)))


def _in_process(file: Path, python: str, folder: Path) -> tuple[int, str]:
    """The verb, whose sbatch takes as long as the tasks do."""
    program = folder / "submit.py"
    program.write_text(
        "import sys\nfrom pdserve.reach import slurm_job\nslurm_job._TOOL_SECONDS = 300.0\n"
        f"sys.argv = {['pdserve', 'sweep', str(file), '--slurm', '--python', python]!r}\n"
        "from pdserve.cli.main import main\nmain()\n"
    )
    done = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, timeout=400, check=False, cwd=folder
    )
    return done.returncode, done.stdout + done.stderr
