"""Which machines a deployment may use: from a Slurm job's variables, or a cluster file."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml

from pdserve.errors import PreflightError
from pdserve.plan.node import Srun, Ssh
from pdserve.reach.candidates import Candidate, Candidates, in_containers, of_cluster, of_job
from pdserve.reach.cluster_file import load_cluster
from pdserve.recipe.sections import Kind
from tests.plan import kit

JOB = {"SLURM_JOB_ID": "42", "SLURM_JOB_NODELIST": "gpu[08-10]", "SLURM_GPUS_ON_NODE": "8"}
CONFIG = """Configuration data as of 2026-11-21T23:08:16
KillOnBadExit           = 0
KillWait                = 90 sec
LaunchParameters        = (null)
"""


@pytest.fixture
def scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One that prints what a file holds."""
    folder = tmp_path / "bin"
    folder.mkdir()
    config = tmp_path / "config"
    config.write_text(CONFIG)
    (tmp_path / "job").write_text("JobId=42 JobState=RUNNING Power= \n")
    program = folder / "scontrol"
    program.write_text(
        f'#!/bin/sh\ncase "$*" in\n"show config") cat {config};;\n'
        f'"show job --oneliner 42") cat {tmp_path}/job;;\nesac\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return config


def cluster(tmp_path: Path, document: Mapping[str, object], exclude: tuple[str, ...] = ()) -> Candidates:
    file = tmp_path / "cluster.yaml"
    file.write_text(yaml.safe_dump({"schema": 1, **document}))
    return of_cluster(load_cluster(file, environ={}), exclude)


def job(*exclude: str, **variables: str) -> Candidates:
    """The nodes of a job."""
    candidates = of_job({**JOB, **variables}, exclude)
    assert candidates is not None
    return candidates


def test_outside_of_a_job_there_is_none() -> None:
    assert of_job({}, ()) is None
    assert of_job({"SLURM_JOB_ID": "42"}, ()) is None


@pytest.mark.process
def test_a_jobs_nodes_are_reached_by_srun_in_slurms_order(scontrol: Path) -> None:
    candidates = job()
    assert [machine.name for machine in candidates.machines] == ["gpu08", "gpu09", "gpu10"]
    assert {machine.reach for machine in candidates.machines} == {Srun(job="42", kill_wait=90)}
    assert (candidates.job, candidates.gpus_per_node, candidates.all_names) == ("42", 8, ("gpu08", "gpu09", "gpu10"))


@pytest.mark.process
@pytest.mark.parametrize(
    ("fields", "there", "gpus"),
    [
        ("TresPerNode=gres:gpu:2", "8", 2),
        ("TresPerNode=gres:gpu:16", "8", 8),
        ("TresPerJob=gres:gpu:2", "8", 8),
        ("", "", None),
        ("", "all", None),
    ],
)
def test_gpus_that_were_not_asked_for_do_not_count(
    tmp_path: Path, scontrol: Path, fields: str, there: str, gpus: int | None
) -> None:
    (tmp_path / "job").write_text(f"JobId=42 JobState=RUNNING Power= {fields} \n")
    assert job(SLURM_GPUS_ON_NODE=there).gpus_per_node == gpus


def test_a_job_of_which_nothing_is_left_is_refused(scontrol: Path) -> None:
    with pytest.raises(PreflightError, match="every node of job 42") as caught:
        job("gpu08", "gpu09", "gpu10")
    assert "--exclude" in str(caught.value.todo)


def test_a_node_list_that_cannot_be_read_is_an_error_and_not_one_odd_name(scontrol: Path) -> None:
    with pytest.raises(PreflightError, match="not a list of nodes") as caught:
        job(SLURM_JOB_NODELIST="gpu[08-")
    assert "SLURM_JOB_NODELIST" in str(caught.value.where)


def test_hosts_of_a_cluster_file_are_reached_by_ssh(tmp_path: Path) -> None:
    candidates = cluster(
        tmp_path,
        {
            "hosts": [{"name": "a"}, {"name": "b", "ssh": "me@b.local", "address": "10.0.0.2", "devices": [4, 5]}],
            "ssh": {"config": "ssh_config", "options": ["Port=2222"], "connect_seconds": 3},
        },
    )
    first, second = candidates.machines
    config = str(tmp_path / "ssh_config")
    assert first.reach == Ssh(destination="a", config=config, options=("-o", "Port=2222"), connect_seconds=3)
    assert (second.name, second.target, second.address, second.devices) == ("b", "10.0.0.2", "10.0.0.2", (4, 5))
    assert isinstance(second.reach, Ssh)
    assert second.reach.destination == "me@b.local"
    assert second.command == (sys.executable,)


def test_the_recipes_exclusions_hold_for_a_cluster_file_too(tmp_path: Path) -> None:
    hosts = {"hosts": [{"name": "a"}, {"name": "b"}]}
    assert [machine.name for machine in cluster(tmp_path, hosts, ("a",)).machines] == ["b"]
    with pytest.raises(PreflightError, match="every host"):
        cluster(tmp_path, hosts, ("a", "b"))


def boxed(there: Candidates, kind: Kind) -> Candidate:
    """The first machine, with a container around what is started there."""
    made = kit.recipe({"container": {"kind": kind, "image": "vllm:1"}})
    return in_containers(there, made, run_id="r1", run_dir="/s", recipe_dir="/r", store="/images").machines[0]


@pytest.mark.process
def test_a_container_in_a_job_has_the_devices_that_slurm_gave_it(scontrol: Path) -> None:
    command = boxed(job(), "docker").command
    assert {"--env=CUDA_VISIBLE_DEVICES", "--env=ROCR_VISIBLE_DEVICES", "--env=SLURM_JOB_ID"} <= set(command)


@pytest.mark.process
def test_pyxis_is_an_option_of_srun(scontrol: Path) -> None:
    machine = boxed(job(), "pyxis")
    reach = machine.reach
    assert isinstance(reach, Srun)
    assert any(option.startswith("--container-image=/images/") for option in reach.options), "the file of all nodes"
    assert machine.command[-1] == "python3"
