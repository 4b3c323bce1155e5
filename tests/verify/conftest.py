"""The deployment that most proofs are tried on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.verify.deployment import Deployment


@pytest.fixture
def deployment(tmp_path: Path) -> Iterator[Deployment]:
    """Not started: each test says with `up` what it needs."""
    with Deployment(tmp_path) as deployment:
        yield deployment
