"""The laboratory itself: it sees what a test leaves."""

from __future__ import annotations

import pytest

from tests.cluster.cluster import Cluster
from tests.cluster.spec import LOGIN

pytestmark = [pytest.mark.cluster, pytest.mark.full]

FORGETFUL = "echo > /dev/shm/forgotten; setsid sleep 1001 >/dev/null 2>&1 &"


def test_a_forgotten_process_segment_and_job_are_named_and_a_reset_takes_them_away(slurm: Cluster) -> None:
    first, second, third = slurm.nodes
    slurm.output(first, ["bash", "-c", FORGETFUL])
    job = slurm.output(LOGIN, ["sbatch", "--parsable", "-w", first, "--wrap=srun sleep 1002", "--output=/dev/null"])
    with pytest.raises(AssertionError) as failure:
        slurm.assert_nothing_left(timeout=0)
    for trace in (f"{first}: /dev/shm/forgotten", "sleep 1001", f"job {job} "):
        assert trace in str(failure.value)
    slurm.cut(second)
    slurm.power_off(third)
    slurm.reset()
    assert slurm.left() == []
    assert sorted(slurm.output(LOGIN, ["srun", "-N3", "hostname"]).split()) == [first, second, third]
