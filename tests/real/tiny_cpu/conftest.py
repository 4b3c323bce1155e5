"""One deployment of recipes/tiny-cpu.yaml for all modules of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.launch.deployment import Deployment, home_in
from tests.real.conftest import Shared, brought_up, serves


@pytest.fixture(scope="package")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A home for run directories that the tests of this folder share."""
    with home_in(tmp_path_factory.mktemp("real")) as folder:
        yield folder


@pytest.fixture(scope="package")
def shared(home: Path) -> Iterator[Shared[Deployment]]:
    """The deployment, and another one after a test that has ended it."""
    deployment = Shared(lambda: contextmanager(brought_up)("tiny-cpu", home), serves)
    yield deployment
    deployment.close()


@pytest.fixture
def made_before(shared: Shared[Deployment]) -> None:
    """What a test did not start is not its to leave behind."""
    shared.get()


@pytest.fixture
def tiny(shared: Shared[Deployment]) -> Deployment:
    """It serves."""
    return shared.get()
