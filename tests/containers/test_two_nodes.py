"""A recipe with `container:` over two nodes that have docker, by ssh and by Slurm."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.cluster.deployments import LIMIT, ORDER
from tests.cluster.spec import LOGIN
from tests.containers.boxes import Boxes
from tests.launch.deployment import wait_until

pytestmark = [pytest.mark.container, pytest.mark.full]


def test_in_a_slurm_job_each_node_has_its_container_which_may_use_what_slurm_gave_of_the_node(boxes: Boxes) -> None:
    up = boxes.sbatch(boxes.over_two(), "--gres=gpu:2").ready()
    assert up.complete()[0] == 200
    for node in boxes.cluster.nodes:
        assert "tests/fakes/engine.py" in boxes.inside(node)
        guard, _ = boxes.guard_and_agent(node)
        environment = Path(f"/proc/{guard}/environ").read_bytes().split(b"\0")
        assert b"CUDA_VISIBLE_DEVICES=0,1" in environment, environment
        assert f"SLURM_JOB_ID={up.job}".encode() in environment
    assert boxes.pdserve(LOGIN, "down").returncode == 0
    assert up.ended() == "COMPLETED"
    assert up.stopped() == ORDER


def test_scancel_leaves_no_container(boxes: Boxes) -> None:
    up = boxes.sbatch(boxes.over_two()).ready()
    boxes.cluster.output(LOGIN, ["scancel", up.job])
    assert up.ended() == "CANCELLED"
    boxes.assert_nothing_left()


def test_a_node_that_is_cut_off_stops_its_container_by_itself(boxes: Boxes) -> None:
    with boxes.up(LOGIN, boxes.over_two(), "--cluster", boxes.hosts()) as up:
        up.ready()
        node = up.node_of("decode-0")
        with boxes.cluster.silent(node):
            up.expect(f"node {node} is lost while serving, and with it decode-0: not heard for")
            wait_until(f"no container on {node}", lambda: not boxes.dockers[node].containers(), LIMIT)
        assert up.ended() == "5"
    boxes.assert_nothing_left()


def test_a_killed_launcher_takes_all_containers_along(boxes: Boxes) -> None:
    with boxes.up(LOGIN, boxes.over_two(), "--cluster", boxes.hosts()) as up:
        up.ready()
        up.process.send_signal(signal.SIGKILL)
        boxes.assert_nothing_left()
