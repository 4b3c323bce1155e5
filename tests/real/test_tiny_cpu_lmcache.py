"""The aggregated mode on the real stack: one vLLM with LMCache behind the same proxy."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.deployment import Deployment, pdserve, read_json
from tests.real.conftest import brought_up

pytestmark = [pytest.mark.real, pytest.mark.full]


@pytest.fixture(scope="module")
def tiny(home: Path) -> Iterator[Deployment]:
    yield from brought_up("tiny-cpu-lmcache", home)


def test_every_proof_that_applies_is_proven(tiny: Deployment) -> None:
    code, output = pdserve("verify", "--json")
    assert code == 0, output
    names = {proof["name"] for proof in read_json(output)["proofs"]}
    assert {"output", "stored", "reload", "clean"} <= names
    assert "transfer" not in names, "nothing is transferred: the claim would be empty"
