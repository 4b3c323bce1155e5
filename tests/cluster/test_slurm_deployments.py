"""A recipe over the nodes of a Slurm job: submitted, or inside an allocation that is already there."""

from __future__ import annotations

import re

import pytest

from tests.cluster.deployments import ORDER, PDSERVE, ClusterDeployment, Lab
from tests.cluster.spec import LOGIN

pytestmark = pytest.mark.cluster


def test_salloc_runs_up_and_gives_the_allocation_back_when_it_ends(job: Lab) -> None:
    argv = ["salloc", "-N2", "--exclusive", *PDSERVE, "up", str(job.recipe())]
    output = job.folder / "salloc.out"
    with (
        output.open("w") as file,
        job.cluster.popen(LOGIN, argv, env=job.env, stdout=file, stderr=file) as process,
    ):
        up = ClusterDeployment(job, output, process=process).ready()
        assert up.complete()[0] == 200
        assert up.node_of("prefill-0") != up.node_of("decode-0")
        down = job.pdserve(LOGIN, "down")
        assert (down.returncode, down.stdout.strip()) == (0, "fake: stopped")
        assert up.ended() == "0", up.printed()
    assert up.stopped() == ORDER
    assert "salloc: Relinquishing job allocation" in up.printed()


@pytest.mark.parametrize("option", ["--overcommit", "--exclusive"])
def test_too_few_gpus_are_reported_with_the_line_to_type(job: Lab, option: str) -> None:
    """In an exclusive job Slurm counts all GPUs of a node as the job's, and gives its steps those that it asked for."""
    recipe = "recipes/kimi-mi355x-2node.yaml"
    up = job.submit(f"#!/bin/sh\nexec pdserve up {recipe}\n", "-N2", "--gres=gpu:2", option)
    assert up.ended() == "FAILED"
    assert "this job has 2 nodes with 2 GPUs each; kimi-mi355x-2node needs 2 nodes with 8 GPUs each" in up.printed()
    assert re.search(rf"sbatch --nodes=2 --gres=gpu:8 slurm/disagg.sh \S*{recipe}", up.printed()), up.printed()
    assert not job.home.exists()


@pytest.mark.full
def test_a_second_job_of_the_same_recipe_leaves_the_first_alone(job: Lab) -> None:
    first = job.sbatch(job.recipe(), "--gres=none").ready()
    env = {"SLURM_JOB_ID": "4711", "SLURM_JOB_NODELIST": ",".join(job.cluster.nodes[1:])}
    second = job.pdserve(job.cluster.nodes[1], "up", job.folder / "fake.yaml", env=env)
    assert second.returncode == 8, second.stdout + second.stderr
    assert f"fake is running on {', '.join(job.cluster.nodes[:2])} (job {first.job})" in second.stderr
    assert "--set name=fake-2" in second.stderr
    assert first.complete()[0] == 200
    job.pdserve(LOGIN, "down")
    assert first.ended() == "COMPLETED"
