"""What the two legs of a request look like to vLLM's NixlPushConnector, and that KV really crosses."""

from __future__ import annotations

from typing import Any

import pytest

from tests.proxy.deployment import MODEL, Deployment
from tests.proxy.test_contract import reference

PROMPT = "The quick brown fox jumps over the lazy dog"


@pytest.fixture
def push(deployment: Deployment) -> Deployment:
    """One prefill, one decode."""
    return deployment.up(push=True)


def legs(deployment: Deployment) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Prefill's and decode's requests, without those by which the proxy learns where prefill is."""
    asked = [request for request in deployment.prefills[0].requests() if request["body"].get("prompt") != [1]]
    return list(zip(asked, deployment.decodes[0].requests(), strict=True))


def test_answers_as_one_engine_alone_and_decode_computes_nothing(push: Deployment) -> None:
    answer = push.complete(PROMPT)
    assert answer.status_code == 200
    assert answer.json()["choices"][0]["text"] == reference(push.prefills[0], prompt=PROMPT)
    assert push.decodes[0].transferred() == len(PROMPT)
    assert push.prefills[0].state()["delivered"] == 1


def test_both_legs_have_one_request_id_that_is_new_and_cannot_be_foreseen(push: Deployment) -> None:
    """Prefill finds decode's blocks by it. Two clients that choose the same id must not meet there."""
    for _ in range(2):
        push.proxy.http.post(
            "/v1/completions",
            json={"model": MODEL, "prompt": PROMPT, "max_tokens": 2},
            headers={"x-request-id": "the-same"},
        )
    pairs = [tuple(leg["headers"]["x-request-id"] for leg in pair) for pair in legs(push)]
    assert all(first == second for first, second in pairs)
    ids = [first for first, _ in pairs]
    assert len(set(ids)) == 2
    assert all(name.startswith("the-same.") and len(name) == len("the-same.") + 32 for name in ids)


def test_the_id_has_no_comma_which_parts_the_ids_of_a_heartbeat(push: Deployment) -> None:
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 2}
    assert push.proxy.http.post("/v1/completions", json=body, headers={"x-request-id": "a,b"}).status_code == 200
    ((first, second),) = legs(push)
    assert first["headers"]["x-request-id"] == second["headers"]["x-request-id"]
    assert first["headers"]["x-request-id"].startswith("a_b.")


def test_decode_is_told_where_prefill_is_and_prefill_is_asked_to_keep_its_kv(push: Deployment) -> None:
    push.complete(PROMPT)
    ((first, second),) = legs(push)
    assert first["body"]["kv_transfer_params"] == {"do_remote_decode": True, "do_remote_prefill": False}
    params = second["body"]["kv_transfer_params"]
    assert params.pop("remote_engine_id").endswith("_dp0")
    assert params.pop("remote_port") > 0
    assert params == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_request_id": "",
        "remote_host": "127.0.0.1",
        "tp_size": 1,
        "pp_size": 1,
    }


def test_decode_has_the_request_while_prefill_computes(deployment: Deployment) -> None:
    deployment.up(push=True)
    prefill, decode = deployment.fakes
    assert deployment.complete(PROMPT).status_code == 200
    prefill.script(hold="prefill")
    with deployment.proxy.open("/v1/completions", {"model": MODEL, "prompt": PROMPT, "max_tokens": 2}):
        prefill.wait(waiting=1)
        decode.wait(waiting=1)
        prefill.script(hold="")
        decode.wait(finished=2)


def test_a_prefill_is_asked_where_it_is_once_for_each_rank(deployment: Deployment) -> None:
    deployment.up(push=True, ranks=3)
    for _ in range(6):
        assert deployment.complete(PROMPT).status_code == 200
    asked = deployment.prefills[0].requests()
    learning = [request["headers"]["x-data-parallel-rank"] for request in asked if request["body"]["prompt"] == [1]]
    # A request that comes before the answers that were asked for at the start waits for these.
    assert learning == ["0", "1", "2"]
    ids = [
        request["body"]["kv_transfer_params"]["remote_engine_id"][-4:] for request in deployment.decodes[0].requests()
    ]
    assert ids == ["_dp0", "_dp1", "_dp2"] * 2


def test_the_responses_api_goes_to_one_engine(push: Deployment) -> None:
    """vLLM makes up the ids of its requests: prefill could not find decode's blocks."""
    answer = push.proxy.http.post("/v1/responses", json={"model": MODEL, "input": PROMPT, "max_output_tokens": 3})
    assert answer.status_code == 200
    (request,) = push.decodes[0].requests()
    assert "kv_transfer_params" not in request["body"]


def test_a_client_cannot_name_a_remote(push: Deployment) -> None:
    evil = {"do_remote_prefill": True, "remote_host": "192.0.2.1", "remote_port": 1, "remote_engine_id": "x"}
    assert push.complete(PROMPT, kv_transfer_params=evil).status_code == 200
    ((first, second),) = legs(push)
    assert "192.0.2.1" not in first["raw"] + second["raw"]
