"""One deployment of recipes/tiny-cpu.yaml for all modules of this folder, whose engines can be told to do wrong."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.deployment import Deployment, home_in
from tests.real import kv_faults
from tests.real.conftest import brought_up

ABORT_SECONDS = 20
"""How long prefill keeps KV that nobody fetches, and decode waits for KV that does not come: less than the minute of
vLLM, so that what only this frees can be told from what is free at once."""


@pytest.fixture(scope="package")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A home for run directories that the tests of this folder share."""
    with home_in(tmp_path_factory.mktemp("real")) as folder:
        yield folder


@pytest.fixture(scope="package")
def deployment(home: Path, faults: Path) -> Iterator[Deployment]:
    plugin = kv_faults.installed(faults)
    settings = {"prefill.env": plugin, "decode.env": plugin, "timeouts.transfer_abort_seconds": ABORT_SECONDS}
    yield from brought_up("tiny-cpu", home, settings)
