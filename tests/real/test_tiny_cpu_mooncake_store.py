"""A Mooncake store on the real stack: the master, what prefill stores and reloads, and the master's death."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.deployment import Deployment
from tests.real.conftest import assert_proven, brought_up

pytestmark = [pytest.mark.real, pytest.mark.full]

PROOFS = ("endpoints", "requests", "transfer", "output", "pool-stored", "pool-reload", "clean")
BODY = {"model": "tiny", "prompt": "one two three " * 200, "max_tokens": 4, "temperature": 0}


@pytest.fixture(scope="module")
def deployment(home: Path) -> Iterator[Deployment]:
    yield from brought_up("tiny-cpu-mooncake-store", home)


def test_every_proof_that_applies_is_proven(tiny: Deployment) -> None:
    assert_proven(*PROOFS)


def test_engines_serve_without_their_master_and_use_the_pool_again_once_it_is_back(tiny: Deployment) -> None:
    before = tiny.id_of("mooncake-master")
    tiny.send_signal("mooncake-master", signal.SIGKILL)
    tiny.wait_for("restarting", name="mooncake-master")
    assert tiny.post("/v1/completions", BODY)[0] == 200
    tiny.wait_for("phase", after="degraded", phase="ready")
    assert tiny.id_of("mooncake-master") != before
    assert_proven(*PROOFS)
