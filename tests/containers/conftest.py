"""Nodes with docker that all tests share, because a daemon and its import cost seconds; each test must have taken its
things away."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
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
def docker_on(folder: Path, nodes: int, *, slurm: bool = False) -> Iterator[With]:
    """A daemon with the image on each node."""
    folder.mkdir(exist_ok=True)
    write_image(folder / "image.tar")
    with Cluster.up(nodes=nodes, slurm=slurm, layers=docker_layers()) as cluster:
        dockers = {node: Docker(cluster, node, folder / f"dockerd-{node}.log") for node in cluster.nodes}
        try:
            for docker in dockers.values():
                docker.start()
            first, *others = dockers.values()
            first.output("import", str(folder / "image.tar"), IMAGE)
            if others:
                # An import by each would be an image of its own, and nodes with different ones are refused.
                first.output("save", "--output", str(folder / "saved.tar"), IMAGE)
            for docker in others:
                docker.output("load", "--input", str(folder / "saved.tar"))
            yield lambda folder: Boxes(cluster, dockers, folder)
        finally:
            for docker in dockers.values():
                if docker.lives:
                    docker.end(signal.SIGTERM)


@pytest.fixture(scope="session")
def one_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[With]:
    with docker_on(tmp_path_factory.mktemp("docker"), 1) as nodes:
        yield nodes


@pytest.fixture(scope="session")
def two_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[With]:
    with docker_on(tmp_path_factory.mktemp("docker"), 2, slurm=True) as nodes:
        yield nodes


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
