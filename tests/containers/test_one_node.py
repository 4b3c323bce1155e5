"""A recipe with `container:` on this machine: everything runs inside, and is gone afterwards."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.deployments import LIMIT, ORDER, ClusterDeployment
from tests.containers.boxes import Boxes
from tests.containers.conftest import With
from tests.launch.deployment import wait_until

pytestmark = pytest.mark.container


@pytest.fixture(scope="module")
def serving(one_node: With, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Boxes, ClusterDeployment]]:
    """A deployment that was detached from the command which started it."""
    box = one_node(tmp_path_factory.mktemp("serving"))
    started = box.pdserve(box.node, "up", box.boxed(decode__restart={"policy": "on-failure"}), "--detach")
    assert started.returncode == 0, started.stdout + started.stderr
    yield box, ClusterDeployment(box, box.folder / "none")
    box.pdserve(box.node, "down")
    box.assert_nothing_left()


def test_the_whole_deployment_is_inside_of_one_container_and_serves(serving: tuple[Boxes, ClusterDeployment]) -> None:
    box, up = serving
    assert up.complete()[0] == 200
    inside = box.inside(box.node)
    for word in ("tests/fakes/engine.py", "tests/fakes/lmcache.py", "pdserve.proxy", "pdserve.node.agent"):
        assert word in inside, inside
    table = box.pdserve(box.node, "status").stdout
    assert table.startswith("fake: ready"), table
    assert re.search(rf"^decode-0\s+\S+\s+{box.node}\s+\d+\s+ready", table, re.MULTILINE), table
    assert len(box.cluster.segments(box.node)) == 2


def test_up_once_more_starts_no_other_container(serving: tuple[Boxes, ClusterDeployment]) -> None:
    box, _ = serving
    before = box.container()
    again = box.pdserve(box.node, "up", box.folder / "fake.yaml")
    assert (again.returncode, "already up" in again.stdout) == (0, True), again.stdout + again.stderr
    assert box.container() == before


def test_the_files_of_a_run_belong_to_the_user(serving: tuple[Boxes, ClusterDeployment]) -> None:
    _, up = serving
    assert {path.stat().st_uid for path in Path(up.run.path).rglob("*")} == {os.getuid()}


@pytest.mark.ends_fixture
def test_an_engine_that_is_killed_inside_is_started_again_in_the_same_container_and_down_stops_all_in_order(
    serving: tuple[Boxes, ClusterDeployment],
) -> None:
    box, up = serving
    before = box.container()
    os.kill(up.pid_of("decode-0"), signal.SIGKILL)
    up.wait_for("died", name="decode-0")
    wait_until("it serves again", lambda: up.complete()[0] == 200, LIMIT, why=up.post_mortem)
    assert box.container() == before
    down = box.pdserve(box.node, "down")
    assert (down.returncode, down.stdout.strip()) == (0, "fake: stopped"), down.stdout + down.stderr
    assert up.stopped()[-len(ORDER) :] == ORDER
    assert box.left() == []
