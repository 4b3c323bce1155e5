"""Clusters that the tests of a module share; each test that has used one must have taken its things away."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.cluster import Cluster
from tests.cluster.deployments import Lab


@pytest.fixture(scope="module")
def slurm_of_the_module() -> Iterator[Cluster]:
    with Cluster.up(nodes=3) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def bare_of_the_module() -> Iterator[Cluster]:
    with Cluster.up(nodes=3, slurm=False) as cluster:
        yield cluster


@pytest.fixture
def slurm(slurm_of_the_module: Cluster) -> Iterator[Cluster]:
    """Three nodes with Slurm and sshd, idle before and after the test."""
    yield slurm_of_the_module
    _as_before(slurm_of_the_module)


@pytest.fixture
def bare(bare_of_the_module: Cluster) -> Iterator[Cluster]:
    """Three nodes with nothing but sshd."""
    yield bare_of_the_module
    _as_before(bare_of_the_module)


@pytest.fixture
def job(slurm: Cluster, tmp_path: Path) -> Lab:
    """For deployments in Slurm jobs."""
    return Lab(slurm, tmp_path)


@pytest.fixture
def hosts(bare: Cluster, tmp_path: Path) -> Lab:
    """For deployments over ssh."""
    return Lab(bare, tmp_path)


def _as_before(cluster: Cluster) -> None:
    """One test's failure is not the next one's."""
    try:
        cluster.assert_nothing_left()
        cluster.wait_idle(cluster.nodes)
    except AssertionError:
        cluster.reset()
        raise
