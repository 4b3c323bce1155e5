"""Clusters that all tests share; each test that has used one must have taken its things away."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.cluster import Cluster
from tests.cluster.deployments import Lab, as_before


@pytest.fixture(scope="session")
def shared_slurm() -> Iterator[Cluster]:
    with Cluster.up(nodes=3) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def shared_bare() -> Iterator[Cluster]:
    with Cluster.up(nodes=3, slurm=False) as cluster:
        yield cluster


@pytest.fixture
def slurm(shared_slurm: Cluster) -> Iterator[Cluster]:
    """Three nodes with Slurm and sshd, idle before and after the test."""
    yield from as_before(shared_slurm)


@pytest.fixture
def bare(shared_bare: Cluster) -> Iterator[Cluster]:
    """Three nodes with nothing but sshd."""
    yield from as_before(shared_bare)


@pytest.fixture
def job(slurm: Cluster, tmp_path: Path) -> Lab:
    """A lab for deployments in Slurm jobs."""
    return Lab(slurm, tmp_path)


@pytest.fixture
def hosts(bare: Cluster, tmp_path: Path) -> Lab:
    """A lab for deployments over ssh."""
    return Lab(bare, tmp_path)
