"""What can happen to a container that serves: noticed in time, named with its cause, and nothing is left."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.deployments import ClusterDeployment, as_before
from tests.containers.boxes import Boxes
from tests.containers.conftest import docker_on
from tests.launch.deployment import wait_until

pytestmark = pytest.mark.container
LATE_SECONDS = 60.0
"""A limit that a busy machine keeps too."""


@pytest.fixture
def own_box(tmp_path: Path) -> Iterator[Boxes]:
    """One node with a docker of its own, for a test that starts the daemon again."""
    with docker_on(tmp_path / "docker", 1) as nodes:
        yield from as_before(nodes(tmp_path))


def lost(up: ClusterDeployment, words: str) -> str:
    """The line in which the user is told that the node is lost, with `words`."""
    line = up.expect(f"node {up.lab.cluster.nodes[0]} is lost while serving")
    assert words in line, line
    return line


def test_docker_kill(box: Boxes) -> None:
    with box.up(box.node, box.boxed()) as up:
        up.ready()
        box.docker.output("kill", box.container())
        lost(up, "docker run ended with exit code 137")
        assert "docker kill, a docker stop whose time was over" in up.expect("likely cause:")
        assert "docker events" in up.expect("what to do:")
        assert up.ended() == "5"
    box.assert_nothing_left()


@pytest.mark.full
def test_docker_stop(box: Boxes) -> None:
    with box.up(box.node, box.boxed()) as up:
        up.ready()
        box.docker.output("stop", "--time=60", box.container())
        lost(up, "it received SIGTERM")
        assert "its container was stopped (docker stop" in up.expect("likely cause:")
        assert up.ended() == "5"
    box.assert_nothing_left()


@pytest.mark.full
def test_a_docker_daemon_that_is_killed(own_box: Boxes) -> None:
    with own_box.up(own_box.node, own_box.boxed()) as up:
        up.ready()
        own_box.docker.end(signal.SIGKILL)
        line = lost(up, "docker run ended with exit code")
        assert line.endswith((" 125", " 1")), "1 if a heartbeat of the launcher was in its socket"
        assert "docker itself failed" in up.expect("likely cause:")
        assert "systemctl status docker" in up.expect("what to do:")
        assert up.ended() == "5"
        assert "docker could not be asked for containers of this run" in up.printed()
    wait_until("nothing runs without a daemon", lambda: not own_box.processes_of("pdserve.node.agent"), LATE_SECONDS)
    own_box.docker.start()
    own_box.pdserve(own_box.node, "down")
    own_box.assert_nothing_left()


@pytest.mark.full
def test_a_docker_daemon_that_hangs(box: Boxes) -> None:
    """Its socket accepts, and nothing is answered: the agent lives, and no word of it comes through."""
    with box.up(box.node, box.boxed()) as up:
        up.ready()
        with box.docker.hanging():
            lost(up, "not heard for")
            assert "docker or its container was stopped, paused or killed" in up.expect("likely cause:")
            # By the agent itself, whose lease ends: no docker can be asked to.
            wait_until("nothing runs", lambda: not box.processes_of("pdserve.node.agent"), LATE_SECONDS)
            assert up.ended() == "5"
            assert "docker could not be asked for containers of this run" in up.printed()
            down = box.pdserve(box.node, "down")
            assert down.returncode != 0, down.stdout
            assert f"docker does not answer on {box.node}" in down.stderr
        down = box.pdserve(box.node, "down")
        assert down.returncode == 0, down.stdout + down.stderr
    box.assert_nothing_left()


def test_a_launcher_that_is_killed_takes_the_container_and_its_own_shared_memory_along(box: Boxes) -> None:
    with box.up(box.node, box.boxed(), "--set", "container.shm_gib=0.25") as up:
        up.ready()
        assert box.cluster.segments(box.node) == []
        up.process.send_signal(signal.SIGKILL)
        box.assert_nothing_left()


@pytest.mark.full
def test_down_after_a_killed_launcher_stops_a_container_that_is_still_there(box: Boxes) -> None:
    slow = box.boxed(engine__env={"VLLM_CPU_KVCACHE_SPACE": 1, "FAKE_SHM": "1", "FAKE_IGNORE_TERM": "1"})
    with box.up(box.node, slow) as up:
        up.ready()
        up.process.send_signal(signal.SIGKILL)
        up.process.wait(LATE_SECONDS)
        again = box.pdserve(box.node, "up", slow)
        assert again.returncode == 8, again.stdout + again.stderr
        assert "container(s) of the last run of fake still run" in again.stderr
        assert "pdserve down fake" in again.stderr
        done = box.pdserve(box.node, "down")
        assert done.returncode == 0, done.stdout + done.stderr
        assert "its launcher is gone; stopped the containers" in done.stdout
        assert done.stdout.endswith("fake: stopped\n")
    box.assert_nothing_left()


def test_an_agent_that_is_killed(box: Boxes) -> None:
    with box.up(box.node, box.boxed()) as up:
        up.ready()
        _, agent = box.guard_and_agent()
        os.kill(agent, signal.SIGKILL)
        lost(up, "killed by SIGKILL")
        assert up.ended() == "5"
    box.assert_nothing_left()
