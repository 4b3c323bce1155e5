"""A Mooncake store on the real stack: the master, what prefill stores and reloads, and the master's death."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.deployment import Deployment, pdserve, read_json
from tests.real.conftest import brought_up

pytestmark = [pytest.mark.real, pytest.mark.full]

BODY = {"model": "tiny", "prompt": "one two three " * 200, "max_tokens": 4, "temperature": 0}


@pytest.fixture(scope="module")
def tiny(home: Path) -> Iterator[Deployment]:
    yield from brought_up("tiny-cpu-mooncake-store", home)


def proofs() -> dict[str, str]:
    """Name -> status, of all that `verify` tries."""
    _, output = pdserve("verify", "--json")
    return {proof["name"]: proof["status"] for proof in read_json(output)["proofs"]}


def test_every_proof_that_applies_is_proven(tiny: Deployment) -> None:
    statuses = proofs()
    assert {"transfer", "output", "pool-stored", "pool-reload", "clean"} <= statuses.keys()
    assert set(statuses.values()) == {"proven"}, statuses


def test_engines_serve_without_their_master_and_use_the_pool_again_once_it_is_back(tiny: Deployment) -> None:
    before = tiny.id_of("mooncake-master")
    tiny.send_signal("mooncake-master", signal.SIGKILL)
    tiny.wait_for("restarting", name="mooncake-master")
    assert tiny.post("/v1/completions", BODY)[0] == 200
    tiny.wait_for("phase", after="degraded", phase="ready")
    assert tiny.id_of("mooncake-master") != before
    assert set(proofs().values()) == {"proven"}
