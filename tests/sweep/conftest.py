"""The client that measures the points of a sweep."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench.kit import stand_in


@pytest.fixture
def python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """What stands for the engines' interpreter: it runs the fake client, which waits more than it computes, so that it
    is not saturated on a busy machine."""
    monkeypatch.setenv("FAKE_TOKEN_SECONDS", "0.4")
    return stand_in(tmp_path, "bench_client.py")
