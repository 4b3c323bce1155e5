"""The deployment that most tests of the proxy talk to."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.proxy.deployment import Deployment


@pytest.fixture
def deployment(tmp_path: Path) -> Iterator[Deployment]:
    """Not started: each test says with `up` what it needs."""
    with Deployment(tmp_path) as deployment:
        yield deployment
