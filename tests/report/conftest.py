"""The sweep that most tests of this folder only read."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.report.results import realistic_sweep


@pytest.fixture(scope="session")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its folder: for tests that only look."""
    return realistic_sweep(tmp_path_factory.mktemp("sweep"))
