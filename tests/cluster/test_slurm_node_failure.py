"""What Slurm itself does about a node that has failed, beside what pdserve does."""

from __future__ import annotations

import pytest

from tests.cluster.deployments import LIMIT, Lab
from tests.cluster.spec import LOGIN
from tests.launch.deployment import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.full]


def test_degrade_outlives_the_node_in_a_job_that_slurm_does_not_kill(job: Lab) -> None:
    recipe = job.recipe(prefill__instances=2, decode__instances=2, on_node_loss="degrade")
    up = job.sbatch(recipe, "--no-kill").ready()
    node = job.cluster.nodes[1]
    job.cluster.power_off(node)
    wait_until(f"Slurm has {node} down", lambda: job.cluster.states()[node].startswith("down"), LIMIT)
    up.expect("deployment is degraded")
    assert up.job_state() == "RUNNING"
    assert up.complete()[0] == 200
    down = job.pdserve(LOGIN, "down")
    assert down.returncode == 0, down.stdout + down.stderr
    assert down.stdout.startswith(f"fake: stopped; {node} was not reached (not heard for")
    assert "Slurm ends what else is left" in down.stdout
    job.cluster.power_on(node)  # not before: Slurm may end the job for a node that has booted meanwhile
    assert up.ended() == "COMPLETED", up.printed()


def test_a_job_that_slurm_ends_for_a_failed_node_has_reported_its_cause_before(job: Lab) -> None:
    up = job.sbatch(job.recipe()).ready()
    node = up.node_of("decode-0")
    job.cluster.power_off(node)
    up.expect(f"error: agent@{node}: node {node} is lost while serving, and with it decode-0")
    assert up.state().phase == "failed"
    job.cluster.power_on(node)
    assert up.ended() in ("FAILED", "NODE_FAIL")
