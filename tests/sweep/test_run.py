"""`pdserve sweep` over fake engines: a start for each recipe, faults are INVALID, it goes on where it was cut."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from pdserve.operations.current_run import find_running
from pdserve.report.rows import read_report
from pdserve.sweep.file import by_deployment, load_sweep, resolve
from pdserve.sweep.record import records_in, task_of
from tests.launch.deployment import REPOSITORY, Command, Deployment, assert_nothing_left, free_ports, pdserve, up
from tests.strikes import at_a_call, strike
from tests.sweep.kit import measured, records, starts, sweep_file

pytestmark = pytest.mark.process

CLIENT_JUST_STARTED = ("pdserve/bench/snapshot.py", "proxy_pids")
LOOP_CLOSES = ("asyncio/base_events.py", "close")


def clients_of(python: str) -> list[str]:
    """Command lines of the fake client that run."""
    lines = [path.read_bytes().replace(b"\0", b" ").decode() for path in Path("/proc").glob("[0-9]*/cmdline")]
    return [line for line in lines if str(Path(python).parent) in line and "bench_client.py" in line]


def test_each_recipe_is_started_once(tmp_path: Path, pdserve_home: Path, python: str) -> None:
    file = sweep_file(tmp_path, cross={"proxy.drain_seconds": [1, 2]})
    code, output = pdserve("sweep", "--dry-run", file)
    assert code == 0, output
    assert "to run: 4 points on 2 starts" in output
    assert not (pdserve_home / "fake").exists(), "nothing has run"
    code, output = pdserve("sweep", "--python", python, file)
    assert code == 0, output
    assert [(each.settings, each.load.concurrency, each.status) for each in records(pdserve_home)] == [
        ((("proxy.drain_seconds", "1"),), 1, "VALID"),
        ((("proxy.drain_seconds", "1"),), 2, "VALID"),
        ((("proxy.drain_seconds", "2"),), 1, "VALID"),
        ((("proxy.drain_seconds", "2"),), 2, "VALID"),
    ]
    assert starts(pdserve_home) == 2
    assert find_running(pdserve_home, "fake") is None
    assert_nothing_left(Deployment(None, pdserve_home))
    folder = measured(pdserve_home)
    for path, record in records_in(folder.path).items():
        result = json.loads((path / str(record.result) / "result.json").read_text())
        assert "drain_seconds: " + record.settings[0][1] in result["provenance"]["recipe"]
        assert (path / str(record.result) / result["measurements"][0]["raw"]).exists()
        kept = folder.starts / str(record.run_id)
        assert list((kept / "logs").glob("prefill-0*"))
        assert (kept / "versions.json").exists()
    code, output = pdserve("sweep", "--dry-run", file)
    assert "to run: 0 points" in output


def test_a_failed_start_is_invalid_and_the_next_run(tmp_path: Path, pdserve_home: Path, python: str) -> None:
    file = sweep_file(tmp_path, cross={"engine.command": [["/nowhere/vllm"], None]}, concurrency=[1])
    command = yaml.safe_load((tmp_path / "fake.yaml").read_text())["engine"]["command"]
    text = yaml.safe_load(file.read_text())
    text["cross"]["engine.command"][1] = command
    file.write_text(yaml.safe_dump(text))
    code, output = pdserve("sweep", "--python", python, file)
    assert code == 12, output
    assert sorted(each.status for each in records(pdserve_home)) == ["INVALID", "VALID"]
    (wrong,) = [each for each in records(pdserve_home) if each.status == "INVALID"]
    assert wrong.reasons[0].check == "start"
    assert "/nowhere/vllm" in wrong.reasons[0].text
    assert "error: " in output
    assert "1 of 2 points are INVALID" in output
    assert find_running(pdserve_home, "fake") is None


@pytest.mark.full
def test_an_invalid_one_is_over(
    tmp_path: Path, pdserve_home: Path, python: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = sweep_file(tmp_path, concurrency=[1])
    monkeypatch.setenv("FAKE_CLIENT", "die")
    code, output = pdserve("sweep", "--python", python, file)
    assert code == 12, output
    monkeypatch.delenv("FAKE_CLIENT")
    code, output = pdserve("sweep", "--python", python, file)
    assert code == 12, "it is over, and still INVALID: " + output
    code, output = pdserve("sweep", "--retry", "--python", python, file)
    assert code == 0, output


def test_a_killed_one_goes_on(tmp_path: Path, pdserve_home: Path, python: str, monkeypatch: pytest.MonkeyPatch) -> None:
    file = sweep_file(tmp_path)
    command = Command("sweep", "--python", python, file)
    command.expect("concurrency 1: VALID")
    (first,) = records(pdserve_home)
    command.popen.send_signal(signal.SIGKILL)
    command.finish()
    assert find_running(pdserve_home, "fake") is not None, "its launcher is a process of its own"
    code, output = pdserve("sweep", "--python", python, file)
    assert code == 0, output
    assert "left by this sweep" in output
    done, second = records(pdserve_home)
    assert done == first, "what is whole is not measured again"
    assert second.status == "VALID"
    assert_nothing_left(Deployment(None, pdserve_home))


@pytest.mark.parametrize(
    ("signum", "late"),
    [(signal.SIGINT, False), (signal.SIGTERM, False), (signal.SIGHUP, True)],
    ids=["client just started, INT", "client just started, TERM", "loop just closed, HUP"],
)
@pytest.mark.full
def test_a_stop_while_a_point_is_measured_ends_its_client_and_the_deployment(
    tmp_path: Path, pdserve_home: Path, python: str, monkeypatch: pytest.MonkeyPatch, signum: signal.Signals, late: bool
) -> None:
    """Also in the moments in which no event loop hears it."""
    places = [CLIENT_JUST_STARTED, LOOP_CLOSES] if late else [CLIENT_JUST_STARTED]
    strike(tmp_path / "site", at_a_call("sweep", *places, signum=signum, late=late), monkeypatch)
    if not late:
        monkeypatch.setenv("FAKE_CLIENT", "hang")
    code, output = pdserve("sweep", "--python", python, sweep_file(tmp_path))
    assert code == 130, output
    assert not records(pdserve_home)
    assert_nothing_left(Deployment(None, pdserve_home))
    assert not clients_of(python)


def test_a_deployment_that_is_not_the_sweeps_own_is_left_alone(tmp_path: Path, pdserve_home: Path, python: str) -> None:
    file = sweep_file(tmp_path)
    with up(tmp_path / "fake.yaml", pdserve_home) as deployment:
        deployment.command.expect("serving fake")
        code, output = pdserve("sweep", "--python", python, file)
        assert code == 8
        assert "pdserve down fake" in output
        assert deployment.state().phase == "ready"


def test_a_combination_that_is_no_recipe_is_refused_before_anything_runs(tmp_path: Path, pdserve_home: Path) -> None:
    code, output = pdserve("sweep", sweep_file(tmp_path, cross={"prefill.instances": [1, "two"]}))
    assert code == 2
    assert "sweep.yaml:" in output
    assert "prefill.instances=two" in output
    assert not (pdserve_home / "fake").exists()


# --- its own deployment, and no other one


MEASURE = """
import subprocess, sys
from pdserve.cli.main import main
from pdserve.sweep.record import SweepFolder

*sys.argv, recipe = sys.argv
write = SweepFolder.write

def written(self, point, record):
    write(self, point, record)
    for words in (["down", "fake"], ["up", "--detach", recipe]):
        subprocess.run([sys.executable, "-m", "pdserve.cli.main", *words], check=True)

SweepFolder.write = written
main()
"""
"""The verb, with another deployment of the same name between its first and its second point."""


def test_anothers_deployment_is_left_alone(tmp_path: Path, pdserve_home: Path, python: str) -> None:
    sweep_file(tmp_path)
    try:
        words = ["sweep", "--python", python, str(tmp_path / "sweep.yaml"), str(tmp_path / "fake.yaml")]
        program = [sys.executable, "-c", MEASURE, *words]
        done = subprocess.run(program, cwd=REPOSITORY, capture_output=True, text=True, timeout=400)
        assert done.returncode == 8, done.stdout + done.stderr
        assert "fake is running already" in done.stdout + done.stderr
        assert [record.load.concurrency for record in records(pdserve_home)] == [1]
        theirs = find_running(pdserve_home, "fake")
        assert theirs is not None
        assert not (measured(pdserve_home).starts / theirs.run_id).exists()
    finally:
        pdserve("down", "fake")
    assert_nothing_left(Deployment(None, pdserve_home))


# --- the tasks of an array, as processes beside each other


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
    folder = measured(pdserve_home)
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
    folder = measured(pdserve_home)
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
