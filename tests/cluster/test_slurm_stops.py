"""How Slurm ends a job, and what is left then: nothing, whatever the stage.

It sends TERM to all, and KillWait later KILL; and it ends a job whose node has failed.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

from tests import isolation
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


@pytest.mark.parametrize(
    ("reached", "changes"),
    [
        (surveying, {}),
        (lambda up: up.wait_for("started", name="decode-0"), {"prefill__env": {"FAKE_NEVER_READY": 1}}),
        (lambda up: up.wait_for("attached"), {"prefill__env": {"FAKE_HOLD": "prefill"}}),
        (ClusterDeployment.ready, {"decode__env": {"FAKE_IGNORE_TERM": 1, "FAKE_CHILD": "setsid", "FAKE_SHM": "leak"}}),
    ],
    ids=["surveying", "starting", "proving", "serving"],
)
@pytest.mark.full
def test_scancel_leaves_nothing(
    job: Lab, reached: Callable[[ClusterDeployment], object], changes: dict[str, Any]
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


def test_a_killed_launcher_takes_everything_along(job: Lab) -> None:
    up = job.sbatch(job.recipe()).ready()
    launcher = up.cluster.nodes[0]
    pid = next(pid for pid, argv in job.cluster.processes(launcher) if "up" in argv and "srun" not in argv[0])
    os.kill(pid, signal.SIGKILL)
    assert up.ended() == "FAILED"
    job.cluster.assert_nothing_left()
    # Slurm may kill a guard before it has removed its cgroup. That has no process any more.
    assert all(isolation.remove_cgroups(node) for node in job.cluster.nodes)
