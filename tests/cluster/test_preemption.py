"""A job that another one takes the nodes of has a grace time, and the site decides who hears of it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.cluster.cluster import Cluster
from tests.cluster.deployments import ORDER, Lab
from tests.cluster.spec import LOGIN, SlurmSettings

pytestmark = [pytest.mark.cluster, pytest.mark.full]

GRACE_SECONDS = 100
PREEMPTION = (
    "PreemptType=preempt/partition_prio",
    "PreemptMode=CANCEL",
    f"PartitionName=modest Nodes=ALL PriorityTier=1 PreemptMode=CANCEL GraceTime={GRACE_SECONDS} State=UP",
    "PartitionName=urgent Nodes=ALL PriorityTier=9 PreemptMode=OFF State=UP",
)


@pytest.mark.parametrize(
    ("parameters", "order"),
    [(("SlurmctldParameters=preempt_send_user_signal",), ORDER), ((), None)],
    ids=["the batch shell hears of it", "every step is told to end"],
)
def test_a_preempted_deployment_is_gone_before_its_grace_time_is_over(
    tmp_path: Path, parameters: tuple[str, ...], order: list[str] | None
) -> None:
    with Cluster.up(nodes=2, slurm=SlurmSettings(more=(*PREEMPTION, *parameters))) as cluster:
        lab = Lab(cluster, tmp_path)
        up = lab.sbatch(lab.recipe(), "--partition=modest").ready()
        urgent = ["sbatch", "--parsable", "--partition=urgent", "--nodes=2", "--exclusive"]
        urgent += ["--output=/dev/null", "--wrap=true"]
        began = time.monotonic()
        cluster.output(LOGIN, urgent)
        assert up.ended() == "COMPLETED"
        took = time.monotonic() - began
        assert took < GRACE_SECONDS
        assert up.state().phase == "stopped", up.printed()
        assert [event for event in up.events("stopped") if event["forced"]] == []
        assert order is None or up.stopped() == order
        cluster.assert_nothing_left()
