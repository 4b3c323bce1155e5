"""`container.kind: docker` where `docker` is podman: no daemon, the same command line."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.cluster import Cluster
from tests.cluster.deployments import ORDER, as_before, assert_all_proven, until_ready
from tests.containers.boxes import TINY_BOX, Boxes, contained
from tests.containers.daemon import Podman, podman_layers
from tests.containers.image import IMAGE, write_image

pytestmark = [pytest.mark.container, pytest.mark.timeout(1200), pytest.mark.full]


class Pods(Boxes):
    """A node with podman and the image."""

    podman: Podman

    def boxed(self, **changes: Any) -> Path:
        return self.podman.added_to(super().boxed(**changes))

    def left(self) -> list[str]:
        """Its own locks stay, as a daemon would."""
        return [each for each in super().left() if not each.endswith("/dev/shm/libpod_lock")]


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Cluster, Podman]]:
    folder = tmp_path_factory.mktemp("podman")
    write_image(folder / "image.tar")
    with Cluster.up(nodes=1, slurm=False, layers=podman_layers()) as cluster:
        podman = Podman(cluster, cluster.nodes[0], folder)
        podman.output("import", str(folder / "image.tar"), IMAGE)
        podman.start()
        yield cluster, podman


@pytest.fixture
def pods(node: tuple[Cluster, Podman], tmp_path: Path) -> Iterator[Pods]:
    cluster, podman = node
    pods = Pods(cluster, {cluster.nodes[0]: podman}, tmp_path)
    pods.podman = podman
    pods.env["PATH"] = f"{podman.programs}:{pods.env['PATH']}"
    yield from as_before(pods)


def test_a_deployment_serves_and_stops_in_order(pods: Pods) -> None:
    with pods.up(pods.node, pods.boxed()) as up:
        up.ready()
        assert up.complete()[0] == 200
        assert "pdserve.node.agent" in pods.inside(pods.node)
        down = pods.pdserve(pods.node, "down")
        assert (down.returncode, down.stdout.strip()) == (0, "fake: stopped"), down.stdout + down.stderr
        assert up.ended() == "0", up.printed()
        assert up.stopped() == ORDER


def test_a_launcher_that_is_killed_takes_the_container_along(pods: Pods) -> None:
    with pods.up(pods.node, pods.boxed()) as up:
        up.ready()
        up.process.send_signal(signal.SIGKILL)
        pods.assert_nothing_left()


def test_every_proof_is_proven_inside(pods: Pods, cache: Path) -> None:
    """With real engines."""
    with pods.up(pods.node, pods.podman.added_to(contained(pods.folder, cache))) as up:
        until_ready(up, TINY_BOX)
        assert_all_proven(up)
        assert pods.pdserve(pods.node, "down", TINY_BOX).returncode == 0
        assert up.ended() == "0"
    pods.assert_nothing_left()
