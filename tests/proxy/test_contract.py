"""What the two legs of a request look like to vLLM's MooncakeConnector, and that KV really crosses."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.proxy.deployment import KEY, MODEL, Deployment, Fake

pytestmark = pytest.mark.process  # on the source too

PROMPT = "The quick brown fox jumps over the lazy dog"


def reference(fake: Fake, **body: object) -> str:
    """Return what one engine alone answers."""
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 8} | body
    answer = fake.http.post("/v1/completions", json=body, headers={"authorization": f"Bearer {KEY}"})
    return str(answer.json()["choices"][0]["text"])


def cached_tokens(deployment: Deployment, prompt: str, stream: bool) -> list[int]:
    """Return how many tokens of a prompt were cached when it came first and when it came again."""
    options: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    cached = []
    for _ in range(2):
        answer = deployment.complete(prompt, **options)
        document = json.loads(answer.text.split("\n\n")[-3].removeprefix("data: ")) if stream else answer.json()
        assert document["usage"]["prompt_tokens"] == len(prompt)
        cached.append(document["usage"]["prompt_tokens_details"]["cached_tokens"])
    return cached


def test_answers_as_one_engine_alone_and_decode_gets_the_whole_prompt_by_transfer(deployment: Deployment) -> None:
    deployment.up()
    answer = deployment.complete(PROMPT)
    assert answer.status_code == 200
    deployment.idle()
    assert deployment.prefills[0].state()["delivered"] == 1
    assert deployment.decodes[0].transferred() == len(PROMPT)
    assert answer.json()["choices"][0]["text"] == reference(deployment.decodes[0])


@pytest.mark.parametrize("stream", [False, True])
def test_cached_tokens_are_those_that_prefill_did_not_compute(deployment: Deployment, stream: bool) -> None:
    """Decode counts all that it was sent as cached."""
    deployment.up()
    assert cached_tokens(deployment, PROMPT, stream) == [0, len(PROMPT) // 16 * 16]


def test_both_legs_carry_one_transfer_id(deployment: Deployment) -> None:
    deployment.up()
    deployment.complete(PROMPT)
    prefill, decode = deployment.prefills[0].body(), deployment.decodes[0].body()
    transfer_id = prefill["kv_transfer_params"]["transfer_id"]
    assert prefill["kv_transfer_params"] == {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "transfer_id": transfer_id,
    }
    engine_id = deployment.proxy.http.get(f"http://127.0.0.1:{deployment.prefills[0].bootstrap}/query").json()["0"]
    assert decode["kv_transfer_params"] == {
        "do_remote_decode": False,
        "do_remote_prefill": True,
        "transfer_id": transfer_id,
        "remote_bootstrap_addr": f"http://127.0.0.1:{deployment.prefills[0].bootstrap}",
        "remote_engine_id": engine_id["engine_id"],
    }


def test_decode_is_asked_before_prefill_has_finished(deployment: Deployment) -> None:
    deployment.up(prefill={"hold": "prefill"})
    with deployment.proxy.open("/v1/completions", {"model": MODEL, "prompt": PROMPT, "max_tokens": 2}):
        deployment.prefills[0].wait(waiting=1)
        deployment.decodes[0].wait(waiting=1)
        deployment.prefills[0].script(hold="")
        deployment.decodes[0].wait(finished=1)


def test_a_first_token_that_is_eos_does_not_lose_the_kv(deployment: Deployment) -> None:
    """Mooncake drops the KV of a prefill that ends by EOS; decode then waits until its timeout."""
    deployment.up(prefill={"eos": 1})
    assert deployment.complete(PROMPT).json()["choices"][0]["finish_reason"] == "length"
    # As with stop tokens that an operator has set on the engine: no client field can switch them off.
    deployment.prefills[0].script(eos=2)
    assert deployment.complete(PROMPT).json()["choices"][0]["text"] == reference(deployment.decodes[0])
    deployment.idle()


def test_data_parallel_ranks_take_turns_and_match(deployment: Deployment) -> None:
    deployment.up(ranks=2)
    for _ in range(4):
        assert deployment.complete(PROMPT).status_code == 200
    query = deployment.proxy.http.get(f"http://127.0.0.1:{deployment.prefills[0].bootstrap}/query").json()
    ranks = {
        request["body"]["kv_transfer_params"]["transfer_id"]: request["headers"]["x-data-parallel-rank"]
        for request in deployment.prefills[0].requests()
    }
    assert sorted(ranks.values()) == ["0", "0", "1", "1"]
    for request in deployment.decodes[0].requests():
        params = request["body"]["kv_transfer_params"]
        assert params["remote_engine_id"] == query[ranks[params["transfer_id"]]]["engine_id"]
        assert "x-data-parallel-rank" not in request["headers"]


def test_a_request_without_an_id_gets_one(deployment: Deployment) -> None:
    deployment.up()
    request_id = deployment.complete(PROMPT).headers["x-request-id"]
    assert [fake.requests()[0]["headers"]["x-request-id"] for fake in deployment.fakes] == [request_id] * 2
