"""A recipe with `container:` over two nodes that have docker, by ssh and by Slurm."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.cluster.deployments import ORDER, ClusterDeployment
from tests.cluster.spec import LOGIN
from tests.containers.boxes import Boxes
from tests.launch.deployment import wait_until

pytestmark = [pytest.mark.container, pytest.mark.full]
_LIMIT = 240.0


def test_over_ssh_each_node_has_its_container(boxes: Boxes) -> None:
    first, second = boxes.cluster.nodes
    with boxes.up(LOGIN, boxes.over_two(), "--cluster", boxes.hosts()) as up:
        up.ready()
        assert up.complete()[0] == 200
        assert "tests/fakes/lmcache.py" in boxes.inside(first)
        assert "tests/fakes/engine.py" in boxes.inside(second)
        assert boxes.pdserve(LOGIN, "down").returncode == 0
        assert up.ended() == "0"
        assert up.stopped() == ORDER
    assert boxes.left() == []


def test_in_a_slurm_job_each_node_has_its_container(boxes: Boxes) -> None:
    up = boxes.sbatch(boxes.over_two()).ready()
    for node in boxes.cluster.nodes:
        assert "tests/fakes/engine.py" in boxes.inside(node)
    assert up.complete()[0] == 200
    assert boxes.pdserve(LOGIN, "down").returncode == 0
    assert up.ended() == "COMPLETED"
    assert up.stopped() == ORDER


def test_what_slurm_gave_of_a_node_is_what_the_container_may_use(boxes: Boxes) -> None:
    up = boxes.sbatch(boxes.over_two(), "--gres=gpu:2").ready()
    for node in boxes.cluster.nodes:
        guard, _ = boxes.guard_and_agent(node)
        environment = Path(f"/proc/{guard}/environ").read_bytes().split(b"\0")
        assert b"CUDA_VISIBLE_DEVICES=0,1" in environment, environment
        assert f"SLURM_JOB_ID={up.job}".encode() in environment
    assert boxes.pdserve(LOGIN, "down").returncode == 0
    assert up.ended() == "COMPLETED"


def test_scancel_leaves_no_container(boxes: Boxes) -> None:
    up = boxes.sbatch(boxes.over_two()).ready()
    boxes.cluster.output(LOGIN, ["scancel", up.job])
    assert up.ended() == "CANCELLED"
    boxes.assert_nothing_left()


def test_docker_kill_on_another_node(boxes: Boxes) -> None:
    with boxes.up(LOGIN, boxes.over_two(), "--cluster", boxes.hosts()) as up:
        up.ready()
        node = up.node_of("decode-0")
        boxes.dockers[node].output("kill", boxes.container(node))
        line = up.expect(f"node {node} is lost while serving")
        assert "docker run through ssh ended with exit code 137" in line
        assert up.ended() == "5"
    boxes.assert_nothing_left()


def test_a_docker_that_hangs_on_another_node_once_the_image_was_looked_at(boxes: Boxes) -> None:
    """It stops at the moment in which `ssh` is called for a container there."""
    first, second = boxes.cluster.nodes
    folder = boxes.folder / "bin"
    folder.mkdir()
    script = folder / "ssh"
    stop = f"/usr/bin/ssh -F {boxes.cluster.ssh_config} {second} 'kill -STOP $(cat /run/docker.pid)' </dev/null"
    script.write_text(
        f'#!/bin/sh\ncase "$*" in *{second}*node_probe*) {stop}; date +%s.%N >{folder}/stopped;; esac\n'
        'exec /usr/bin/ssh "$@"\n'
    )
    script.chmod(0o755)
    path = {"PATH": f"{folder}:{boxes.env['PATH']}"}
    try:
        with boxes.up(first, boxes.over_two(), "--cluster", boxes.hosts(), env=path) as up:
            up.expect(f"docker does not answer on {second}: nothing comes out of its containers")
            waited = time.time() - float((folder / "stopped").read_text())
            assert waited < _LIMIT / 4
            assert up.ended() == "3"
    finally:
        boxes.dockers[second].go_on()
    boxes.assert_nothing_left()


def test_docker_kill_in_a_slurm_job(boxes: Boxes) -> None:
    up = boxes.sbatch(boxes.over_two()).ready()
    node = up.node_of("decode-0")
    boxes.dockers[node].output("kill", boxes.container(node))
    assert "docker run through srun ended with exit code 137" in up.expect(f"node {node} is lost while serving")
    assert up.ended() == "FAILED"
    boxes.assert_nothing_left()


def cut(up: ClusterDeployment, node: str) -> None:
    up.cluster.cut(node)
    up.expect(f"node {node} is lost while serving, and with it decode-0: not heard for")


def test_a_node_that_is_cut_off_stops_its_container_by_itself(boxes: Boxes) -> None:
    with boxes.up(LOGIN, boxes.over_two(), "--cluster", boxes.hosts()) as up:
        up.ready()
        node = up.node_of("decode-0")
        try:
            cut(up, node)
            wait_until(f"no container on {node}", lambda: not boxes.dockers[node].containers(), _LIMIT)
        finally:
            boxes.cluster.heal(node)
        assert up.ended() == "5"
    boxes.assert_nothing_left()


def test_a_killed_launcher_takes_all_containers_along(boxes: Boxes) -> None:
    with boxes.up(LOGIN, boxes.over_two(), "--cluster", boxes.hosts()) as up:
        up.ready()
        up.process.send_signal(signal.SIGKILL)
        boxes.assert_nothing_left()


def test_agent_and_guard_that_are_killed_on_another_node(boxes: Boxes) -> None:
    with boxes.up(LOGIN, boxes.over_two(), "--cluster", boxes.hosts()) as up:
        up.ready()
        node = up.node_of("decode-0")
        guard, _ = boxes.guard_and_agent(node)
        os.kill(guard, signal.SIGKILL)
        up.expect(f"node {node} is lost while serving")
        assert up.ended() == "5"
    boxes.assert_nothing_left()
