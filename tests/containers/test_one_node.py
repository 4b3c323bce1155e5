"""A recipe with `container:` on this machine: everything runs inside, and is gone afterwards."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from tests.cluster.deployments import LIMIT
from tests.containers.boxes import Boxes
from tests.launch.deployment import wait_until

pytestmark = pytest.mark.container


def test_the_whole_deployment_is_inside_of_one_container_and_serves(box: Boxes) -> None:
    with box.up(box.node, box.boxed()) as up:
        up.ready()
        assert up.complete()[0] == 200
        inside = box.inside(box.node)
        for word in ("tests/fakes/engine.py", "tests/fakes/lmcache.py", "pdserve.proxy", "pdserve.node.agent"):
            assert word in inside, inside
        table = box.pdserve(box.node, "status").stdout
        assert table.startswith("fake: ready"), table
        assert re.search(rf"^decode-0\s+\S+\s+{box.node}\s+\d+\s+ready", table, re.MULTILINE), table
        assert len(box.cluster.segments(box.node)) == 2
        down = box.pdserve(box.node, "down")
        assert (down.returncode, down.stdout.strip()) == (0, "fake: stopped"), down.stdout + down.stderr
        assert up.ended() == "0", up.printed()
        assert up.stopped() == ["proxy", "decode-0", "prefill-0", "lmcache-0"]
    assert box.left() == []


def test_preflight_looks_from_inside_and_leaves_nothing(box: Boxes) -> None:
    done = box.pdserve(box.node, "preflight", box.boxed())
    assert done.returncode == 0, done.stdout + done.stderr
    assert box.left() == []
    assert not any(box.home.glob("fake/*"))


def test_a_detached_deployment_in_a_container_outlives_its_command(box: Boxes) -> None:
    started = box.pdserve(box.node, "up", box.boxed(), "--detach")
    assert started.returncode == 0, started.stdout + started.stderr
    assert len(box.docker.containers()) == 1
    again = box.pdserve(box.node, "up", box.folder / "fake.yaml")
    assert (again.returncode, "already up" in again.stdout) == (0, True), again.stdout + again.stderr
    assert box.pdserve(box.node, "down").returncode == 0


def test_an_engine_that_dies_inside_is_named_with_its_last_words(box: Boxes) -> None:
    # Without a segment: one that is made in the last milliseconds of a process is not seen to be of ours.
    dies = {"FAKE_DIE_AT": "load", "FAKE_LAST_LINES": "RuntimeError: no such weights", "FAKE_SHM": ""}
    recipe = box.boxed(decode__env=dies)
    with box.up(box.node, recipe) as up:
        up.expect("error: decode-0@")
        up.expect("RuntimeError: no such weights")
        assert up.ended() == "4"


def test_an_engine_that_is_killed_inside_is_started_again_in_the_same_container(box: Boxes) -> None:
    with box.up(box.node, box.boxed(decode__restart={"policy": "on-failure"})) as up:
        up.ready()
        before = box.container()
        os.kill(up.pid_of("decode-0"), signal.SIGKILL)
        up.wait_for("died", name="decode-0")
        wait_until("it serves again", lambda: up.complete()[0] == 200, LIMIT, why=up.printed)
        assert box.container() == before
        up.process.send_signal(signal.SIGINT)
        assert up.ended() == "0"


def test_its_own_shared_memory_goes_with_the_container(box: Boxes) -> None:
    recipe = box.boxed()
    with box.up(box.node, recipe, "--set", "container.shm_gib=0.25") as up:
        up.ready()
        assert box.cluster.segments(box.node) == []
        up.process.send_signal(signal.SIGINT)
        assert up.ended() == "0"


def test_the_files_of_a_run_belong_to_the_user(box: Boxes) -> None:
    with box.up(box.node, box.boxed()) as up:
        up.ready()
        owners = {path.stat().st_uid for path in Path(up.run.path).rglob("*")}
        assert owners == {os.getuid()}
        up.process.send_signal(signal.SIGINT)
        assert up.ended() == "0"
