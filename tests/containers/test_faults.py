"""What can happen to a container that serves: noticed in time, named with its cause, and nothing is left."""

from __future__ import annotations

import os
import signal

import pytest

from tests.cluster.deployments import ClusterDeployment
from tests.containers.boxes import Boxes, kill
from tests.launch.deployment import ENGINE, wait_until

pytestmark = pytest.mark.container
HEARTBEAT_SECONDS = 5.0
"""Of the recipe."""
LATE_SECONDS = 60.0
"""A limit that a busy machine keeps too."""


def lost(up: ClusterDeployment, words: str, *, when: str = "while serving") -> str:
    """The line in which the user is told that the node is lost, with `words`."""
    line = up.expect(f"node {up.lab.cluster.nodes[0]} is lost {when}")
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
def test_docker_stop_without_patience(box: Boxes) -> None:
    """Its KILL comes before the agent has stopped everything."""
    recipe = box.boxed(engine__env={"VLLM_CPU_KVCACHE_SPACE": 1, "FAKE_SHM": "1", "FAKE_IGNORE_TERM": "1"})
    with box.up(box.node, recipe) as up:
        up.ready()
        box.docker.output("stop", "--time=0", box.container())
        assert up.ended() == "5"
    box.assert_nothing_left()


@pytest.mark.parametrize("unread", [False, True])
@pytest.mark.full
def test_a_docker_daemon_that_is_killed(own_box: Boxes, unread: bool) -> None:
    """`unread`: with a heartbeat of the launcher in its socket, which makes the exit code of `docker run` 1."""
    with own_box.up(own_box.node, own_box.boxed()) as up:
        up.ready()
        if unread:
            own_box.docker.kill_with_unread_input()
            line = lost(up, "docker run ended with exit code")
            assert line.endswith(" 1")
        else:
            own_box.docker.kill()
            line = lost(up, "docker run ended with exit code")
            assert line.endswith((" 125", " 1")), "by chance as above"
        assert "docker itself failed" in up.expect("likely cause:")
        assert "systemctl status docker" in up.expect("what to do:")
        assert up.ended() == "5"
        assert "docker could not be asked for containers of this run" in up.printed()
    wait_until("nothing runs without a daemon", lambda: not own_box.processes_of("pdserve.node.agent"), LATE_SECONDS)
    own_box.docker.start()
    own_box.pdserve(own_box.node, "down")
    own_box.assert_nothing_left()


@pytest.mark.full
def test_a_docker_daemon_that_is_stopped_by_its_owner(own_box: Boxes) -> None:
    with own_box.up(own_box.node, own_box.boxed()) as up:
        up.ready()
        own_box.docker.stop()
        assert up.ended() == "5", up.printed()
        assert "is lost while serving" in up.printed()
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


@pytest.mark.full
def test_a_docker_daemon_that_hangs_while_the_engines_start(box: Boxes) -> None:
    recipe = box.boxed(engine__env={"VLLM_CPU_KVCACHE_SPACE": 1, "FAKE_SHM": "1", "FAKE_NEVER_READY": "1"})
    with box.up(box.node, recipe) as up:
        wait_until("engines load", lambda: box.processes_of(ENGINE[1]), LATE_SECONDS, why=up.printed)
        with box.docker.hanging():
            lost(up, "not heard for", when="while starting")
            assert up.ended() == "4"
        assert box.pdserve(box.node, "down").returncode == 0
    box.assert_nothing_left()


@pytest.mark.full
def test_a_container_that_is_paused_is_missed_within_the_heartbeat(box: Boxes) -> None:
    with box.up(box.node, box.boxed()) as up:
        up.ready()
        box.docker.output("pause", box.container())
        lost(up, "not heard for")
        assert "docker or its container was stopped, paused or killed" in up.expect("likely cause:")
        assert up.ended() == "5"
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


@pytest.mark.full
def test_a_guard_that_is_killed(box: Boxes) -> None:
    with box.up(box.node, box.boxed()) as up:
        up.ready()
        guard, _ = box.guard_and_agent()
        os.kill(guard, signal.SIGKILL)
        lost(up, "is lost while serving")
        assert up.ended() == "5"
    box.assert_nothing_left()


@pytest.mark.full
def test_agent_and_guard_that_are_killed_at_once(box: Boxes) -> None:
    with box.up(box.node, box.boxed()) as up:
        up.ready()
        kill(*box.guard_and_agent())
        lost(up, "docker run ended with exit code 137")
        assert up.ended() == "5"
    box.assert_nothing_left()


@pytest.mark.full
def test_launcher_agent_and_guard_that_are_killed_at_once(box: Boxes) -> None:
    with box.up(box.node, box.boxed()) as up:
        up.ready()
        launcher = up.process.inner_pid
        assert launcher is not None
        kill(*box.guard_and_agent(), launcher=launcher)
        done = box.pdserve(box.node, "down")
        assert done.returncode == 0, done.stdout + done.stderr
    box.assert_nothing_left()


@pytest.mark.full
def test_a_docker_client_that_is_killed(box: Boxes) -> None:
    with box.up(box.node, box.boxed()) as up:
        up.ready()
        os.kill(box.client(), signal.SIGKILL)
        lost(up, "docker run ended with exit code -9")
        assert up.ended() == "5"
    box.assert_nothing_left()
