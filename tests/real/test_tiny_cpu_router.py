"""vllm-router in front of real engines: it serves, and `verify` says which proof it does not pass."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from openai import AuthenticationError, OpenAI

from tests.launch.deployment import Deployment, pdserve, read_json
from tests.real.conftest import brought_up, proofs_of_verify

pytestmark = [pytest.mark.real, pytest.mark.full]


@pytest.fixture(scope="module")
def deployment(home: Path) -> Iterator[Deployment]:
    yield from brought_up("tiny-cpu-router", home)


def test_it_is_a_process_like_any_other(tiny: Deployment) -> None:
    code, output = pdserve("status", "--json")
    status = read_json(output)
    assert (code, status["phase"]) == (0, "ready")
    assert {name: process["phase"] for name, process in status["processes"].items()} == dict.fromkeys(
        ("prefill-0", "decode-0", "proxy"), "ready"
    )
    assert [event["name"] for event in tiny.events("ready")][-1] == "proxy"
    assert "Router ready" in pdserve("logs", "proxy")[1]


def test_the_one_proof_that_it_never_passes_is_the_list_of_models(tiny: Deployment) -> None:
    """A client that leaves when prefill is done and decode has not begun leaves prefill's KV there: a race, which
    `clean` may meet."""
    code, proofs, output = proofs_of_verify()
    clean = proofs.pop("clean")
    assert {name: proof["status"] for name, proof in proofs.items()} == {
        "endpoints": "failed",
        "requests": "proven",
        "transfer": "proven",
        "output": "proven",
    }, output
    if clean["status"] != "proven":
        assert re.search(r": prefill-0 \(0 unfinished, KV use 0\.\d+\)\. ", clean["reason"]), output
        assert clean["numbers"]["decode-0: running, KV use"] == "0, 0 -> 0", output
    assert code == 6
    assert "they can send requests and cannot list models" in proofs["endpoints"]["reason"]
    with OpenAI(base_url=f"{tiny.state().endpoint}/v1", api_key="none", max_retries=0) as client:
        completion = client.completions.create(model="tiny", prompt="hello", max_tokens=4)
        assert completion.choices[0].finish_reason == "length"
        with pytest.raises(AuthenticationError):
            client.models.list()
