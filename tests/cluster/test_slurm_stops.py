"""How Slurm ends a job, and what is left then: nothing, whatever the stage.

It sends TERM to all, and KillWait later KILL; it gives a grace time to a job whose nodes another one takes, and the
site decides who hears of it; and it ends a job whose node has failed.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import isolation
from tests.cluster.cluster import Cluster
from tests.cluster.deployments import LIMIT, ORDER, ClusterDeployment, Lab
from tests.cluster.spec import LOGIN
from tests.launch.deployment import wait_until

pytestmark = pytest.mark.cluster


def surveying(up: ClusterDeployment) -> None:
    wait_until(
        "a node probe",
        lambda: any("pdserve.preflight.node_probe" in line for line in up.ours(up.cluster.nodes[1])),
        LIMIT,
    )


def starting(up: ClusterDeployment) -> None:
    up.wait_for("started", name="decode-0")


def proving(up: ClusterDeployment) -> None:
    up.wait_for("attached")


def serving(up: ClusterDeployment) -> None:
    up.ready()


@pytest.mark.parametrize(
    ("reached", "changes"),
    [
        (surveying, {}),
        (starting, {"prefill__env": {"FAKE_NEVER_READY": 1}}),
        (proving, {"prefill__env": {"FAKE_HOLD": "prefill"}}),
        (serving, {"decode__env": {"FAKE_IGNORE_TERM": 1, "FAKE_CHILD": "setsid", "FAKE_SHM": "leak"}}),
    ],
)
@pytest.mark.full
def test_scancel_leaves_nothing(
    job: Lab, reached: Callable[[ClusterDeployment], None], changes: dict[str, Any]
) -> None:
    up = job.sbatch(job.recipe(**changes))
    reached(up)
    job.cluster.output(LOGIN, ["scancel", up.job])
    assert up.ended() == "CANCELLED"
    job.cluster.assert_nothing_left()


def test_scancel_is_survived_by_the_record(job: Lab) -> None:
    up = job.sbatch(job.recipe()).ready()
    job.cluster.output(LOGIN, ["scancel", up.job])
    assert up.ended() == "CANCELLED"
    assert up.state().phase == "stopped", up.printed()
    assert [event for event in up.events("stopped") if event["forced"]] == []
    assert job.pdserve(LOGIN, "status").stdout.startswith("fake: stopped")


@pytest.mark.full
def test_the_time_limit_lets_a_stream_end_before_anything_is_stopped(job: Lab) -> None:
    recipe = job.recipe(proxy__drain_seconds=20, decode__env={"FAKE_HOLD": "token"})
    # Slurm looks every 30 s and may signal so much earlier: not within the first minute, and 30 s before the end.
    up = job.sbatch(recipe, "--time=2", "--signal=B:TERM@30")
    up.wait_for("attached")
    up.script("decode-0", hold="")
    up.ready()
    up.script("decode-0", hold="token")
    with up.talk(max_tokens=6, stream=True) as answer:
        lines = answer.iter_lines()
        assert next(lines).startswith("data: {")
        up.expect("deployment is draining")
        up.script("decode-0", hold="")
        assert "data: [DONE]" in lines
    assert up.ended() == "COMPLETED"
    assert up.stopped() == ORDER
    assert [event for event in up.events("stopped") if event["forced"]] == []


def runs_now(up: ClusterDeployment) -> bool:
    """Slurm lets a requeued job wait for two minutes, and sets that time once more when its last step is gone. A job
    that has been started meanwhile refuses the change. Slurm 22.05 may also take the end of the first script, when that
    comes late, for the end of the job, in the second in which it was requeued: then it is requeued once more."""
    state = up.job_state()
    if state == "RUNNING":
        return True
    if state == "PENDING":
        up.cluster.run(LOGIN, ["scontrol", "update", f"JobId={up.job}", "StartTime=now"])
    elif "RunTime=00:00:00" in up.shown_by_slurm():
        up.cluster.run(LOGIN, ["scontrol", "requeue", up.job])
    return False


@pytest.mark.full
def test_a_requeued_job_is_a_new_run_and_the_old_one_is_gone(job: Lab) -> None:
    up = job.sbatch(job.recipe(), "--requeue").ready()
    first = up.run.run_id
    job.cluster.output(LOGIN, ["scontrol", "requeue", up.job])
    wait_until("the job waits", lambda: up.job_state() in ("PENDING", "FAILED"), LIMIT, why=up.printed)
    left = [line for node in job.cluster.nodes for line in up.ours(node)]
    assert left == []
    job.cluster.wait_idle()  # not before its first script has ended
    wait_until("the job runs again", lambda: runs_now(up), LIMIT, why=lambda: f"{up.shown_by_slurm()}\n{up.printed()}")
    up.expect("serving fake at", times=2)
    assert up.run.run_id != first
    assert up.complete()[0] == 200
    assert job.pdserve(LOGIN, "down").returncode == 0
    assert up.ended() == "COMPLETED"


def test_a_killed_launcher_takes_everything_along(job: Lab) -> None:
    up = job.sbatch(job.recipe()).ready()
    launcher = up.cluster.nodes[0]
    pid = next(pid for pid, argv in job.cluster.processes(launcher) if "up" in argv and "srun" not in argv[0])
    os.kill(pid, signal.SIGKILL)
    assert up.ended() == "FAILED"
    job.cluster.assert_nothing_left()
    # Slurm may kill a guard before it has removed its cgroup. That has no process any more.
    assert all(isolation.remove_cgroups(node) for node in job.cluster.nodes)


GRACE_SECONDS = 100
PREEMPTION = (
    "PreemptType=preempt/partition_prio",
    "PreemptMode=CANCEL",
    f"PartitionName=modest Nodes=ALL PriorityTier=1 PreemptMode=CANCEL GraceTime={GRACE_SECONDS} State=UP",
    "PartitionName=urgent Nodes=ALL PriorityTier=9 PreemptMode=OFF State=UP",
)


@pytest.mark.full
def test_a_preempted_deployment_is_gone_before_its_grace_time_is_over(tmp_path: Path) -> None:
    """Every step is told to end, in no order; with preempt_send_user_signal it is as after a scancel."""
    with Cluster.up(nodes=2, more=PREEMPTION) as cluster:
        lab = Lab(cluster, tmp_path)
        up = lab.sbatch(lab.recipe(), "--partition=modest").ready()
        began = time.monotonic()
        cluster.output(LOGIN, ["sbatch", "--partition=urgent", "-N2", "--exclusive", "-o/dev/null", "--wrap=true"])
        assert up.ended() == "COMPLETED"
        assert time.monotonic() - began < GRACE_SECONDS
        assert up.state().phase == "stopped", up.printed()
        assert [event for event in up.events("stopped") if event["forced"]] == []
        cluster.assert_nothing_left()
