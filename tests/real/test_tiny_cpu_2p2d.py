"""Two prefills and two decodes on the real stack: every proof holds, and every instance takes part."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.deployment import Deployment, pdserve, read_json
from tests.real.conftest import brought_up

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def tiny(home: Path) -> Iterator[Deployment]:
    yield from brought_up("tiny-cpu-2p2d", home)


def test_every_proof_is_proven(tiny: Deployment) -> None:
    code, output = pdserve("verify", "--json")
    assert code == 0, output


def test_every_instance_took_part(tiny: Deployment) -> None:
    status = read_json(pdserve("status", "--json")[1])
    engines = {name: process["engine"] for name, process in status["processes"].items() if process["engine"]}
    assert set(engines) == {"prefill-0", "prefill-1", "decode-0", "decode-1"}
    assert all(sum(engine["prompt_tokens"].values()) > 0 for engine in engines.values()), engines
