"""Nodes with docker that all tests share, because a daemon and its import cost seconds; each test must have taken its
things away."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cluster.cluster import Cluster
from tests.cluster.deployments import as_before
from tests.containers.boxes import Boxes
from tests.containers.daemon import Docker, docker_layers
from tests.containers.image import IMAGE, write_image

With = Callable[[Path], Boxes]
"""A `Boxes` for a folder."""


@contextmanager
def docker_on(cluster: Cluster, folder: Path, nodes: Sequence[str]) -> Iterator[dict[str, Docker]]:
    """A daemon with the image on each of these nodes."""
    tar = folder / "image.tar"
    write_image(tar)
    dockers = {node: Docker(cluster, node, folder / f"dockerd-{node}.log") for node in nodes}
    try:
        for docker in dockers.values():
            docker.start()
        first, *others = dockers.values()
        first.output("import", str(tar), IMAGE)
        if others:
            # An import by each would be an image of its own, and nodes with different ones are refused.
            first.output("save", "--output", str(folder / "saved.tar"), IMAGE)
        for docker in others:
            docker.output("load", "--input", str(folder / "saved.tar"))
        yield dockers
    finally:
        for docker in dockers.values():
            if docker.lives:
                docker.end(signal.SIGTERM)


@pytest.fixture(scope="session")
def one_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[With]:
    with (
        Cluster.up(nodes=1, slurm=False, layers=docker_layers()) as cluster,
        docker_on(cluster, tmp_path_factory.mktemp("docker"), cluster.nodes) as dockers,
    ):
        yield lambda folder: Boxes(cluster, dockers, folder)


@pytest.fixture(scope="session")
def two_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[With]:
    with (
        Cluster.up(nodes=2, layers=docker_layers()) as cluster,
        docker_on(cluster, tmp_path_factory.mktemp("docker"), cluster.nodes) as dockers,
    ):
        yield lambda folder: Boxes(cluster, dockers, folder)


@pytest.fixture
def box(one_node: With, tmp_path: Path) -> Iterator[Boxes]:
    """One node with docker."""
    yield from as_before(one_node(tmp_path))


@pytest.fixture
def boxes(two_nodes: With, tmp_path: Path) -> Iterator[Boxes]:
    """Two nodes with docker, Slurm and sshd."""
    yield from as_before(two_nodes(tmp_path))


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which vLLM keeps, between starts, what it learned about a model's class in 8 s of CPU."""
    return tmp_path_factory.mktemp("cache")
