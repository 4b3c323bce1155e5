"""What the two legs of a request look like to the connectors beside Mooncake's (test_contract.py), and that KV really
crosses: NixlConnector, and MoRIIOConnector in READ mode.
"""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from pdserve.pd.protocols import chosen_ids
from pdserve.pd.requests.body import Body
from pdserve.pd.requests.scan import Scan
from tests.proxy.deployment import MODEL, Deployment
from tests.proxy.test_contract import reference

PROMPT = "The quick brown fox jumps over the lazy dog"


SPLITS: dict[str, dict[str, Any]] = {"nixl": {"nixl": True}, "moriio": {"moriio": True}}


@pytest.mark.parametrize("way", SPLITS.values(), ids=SPLITS)
def test_answers_as_one_engine_alone_and_decode_computes_nothing(deployment: Deployment, way: dict[str, Any]) -> None:
    deployment.up(**way)
    answer = deployment.complete(PROMPT)
    assert answer.status_code == 200
    assert answer.json()["choices"][0]["text"] == reference(deployment.prefills[0], prompt=PROMPT)
    assert deployment.decodes[0].transferred() == len(PROMPT)
    deployment.prefills[0].wait(delivered=1, held=0)


@pytest.mark.parametrize("way", SPLITS.values(), ids=SPLITS)
def test_a_client_cannot_name_a_remote(deployment: Deployment, way: dict[str, Any]) -> None:
    deployment.up(**way)
    evil = {"do_remote_prefill": True, "remote_host": "192.0.2.1", "remote_port": 1, "remote_engine_id": "x"}
    assert deployment.complete(PROMPT, kv_transfer_params=evil | {"remote_handshake_port": 1}).status_code == 200
    assert not ["192.0.2.1" in request["raw"] for fake in deployment.fakes for request in fake.requests()].count(True)


@pytest.mark.parametrize("way", SPLITS.values(), ids=SPLITS)
def test_decode_gets_the_parameters_byte_for_byte(deployment: Deployment, way: dict[str, Any]) -> None:
    """The fake writes a number as 10.0, or 1.0: whoever reads it and writes it anew may not."""
    deployment.up(**way)
    deployment.complete(PROMPT, max_tokens=2, vendor=1.50)
    sent, _, params = deployment.decodes[0].requests()[0]["raw"].partition(',"kv_transfer_params":')
    assert json.loads(sent + "}") == {"model": MODEL, "prompt": PROMPT, "max_tokens": 2, "vendor": 1.50}
    assert params.startswith('{"do_remote_prefill": true, "do_remote_decode": false, "remote_block_ids": [[7, 8, 9]]')
    assert ('"remote_num_tokens": 10.0' if "nixl" in way else '"tp_size": 1.0') in params


@pytest.mark.parametrize("way", SPLITS.values(), ids=SPLITS)
def test_decode_is_asked_only_after_prefill_has_answered(deployment: Deployment, way: dict[str, Any]) -> None:
    deployment.up(**way, prefill={"hold": "prefill"})
    prefill, decode = deployment.fakes
    with deployment.proxy.open("/v1/completions", {"model": MODEL, "prompt": PROMPT, "max_tokens": 2}):
        prefill.wait(waiting=1)
        assert "x-data-parallel-rank" not in prefill.requests()[0]["headers"], "it has one rank"
        assert decode.state()["received"] == 0
        prefill.script(hold="")
        decode.wait(finished=1)


@pytest.mark.parametrize("way", SPLITS.values(), ids=SPLITS)
def test_where_prefill_keeps_nothing_decode_computes_the_prompt(deployment: Deployment, way: dict[str, Any]) -> None:
    """MoRI-IO keeps what ended by length alone."""
    deployment.up(**way, prefill={"keeps_nothing": 1} if "nixl" in way else {"eos": 2})
    answer = deployment.complete(PROMPT)
    deployment.prefills[0].script(eos=0)
    assert answer.json()["choices"][0]["text"] == reference(deployment.prefills[0], prompt=PROMPT)
    assert "kv_transfer_params" not in deployment.decodes[0].body()
    assert deployment.decodes[0].transferred() == 0


@pytest.fixture
def nixl(deployment: Deployment) -> Deployment:
    """One prefill, one decode."""
    return deployment.up(nixl=True)


def test_wrong_kv_changes_the_answer(deployment: Deployment) -> None:
    """The control for the test above: the fake's output does depend on what prefill has kept."""
    deployment.up(nixl=True, decode={"wrong_kv": 1})
    wrong = deployment.complete(PROMPT).json()["choices"][0]["text"]
    assert wrong != reference(deployment.prefills[0], prompt=PROMPT)


def test_prefill_is_asked_to_keep_its_kv_and_knows_no_remote(nixl: Deployment) -> None:
    nixl.complete(PROMPT, stream=True, max_tokens=5, stop=["x"])
    leg = nixl.prefills[0].body()
    params = leg.pop("kv_transfer_params")
    assert {name: value for name, value in params.items() if value is not None} == {
        "do_remote_decode": True,
        "do_remote_prefill": False,
    }
    assert leg == {"model": MODEL, "prompt": PROMPT, "max_tokens": 1, "stream": False, "ignore_eos": True}


@pytest.mark.parametrize("eos", [1, 2])
def test_a_prefill_that_ends_by_stop_is_no_harm(deployment: Deployment, eos: int) -> None:
    deployment.up(nixl=True, prefill={"eos": eos})
    answer = deployment.complete(PROMPT)
    deployment.prefills[0].script(eos=0)
    assert answer.json()["choices"][0]["text"] == reference(deployment.prefills[0], prompt=PROMPT)
    deployment.idle()


@pytest.mark.parametrize("stream", [False, True])
def test_cached_tokens_are_those_that_prefill_did_not_compute(nixl: Deployment, stream: bool) -> None:
    """Decode counts all that it has pulled as cached."""
    options: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    cached = []
    for _ in range(2):
        answer = nixl.complete(PROMPT, **options)
        document = json.loads(answer.text.split("\n\n")[-3].removeprefix("data: ")) if stream else answer.json()
        cached.append(document["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert cached == [0, len(PROMPT) // 16 * 16]


def test_cached_tokens_are_decodes_own_where_it_computed_the_prompt(deployment: Deployment) -> None:
    deployment.up(nixl=True, prefill={"keeps_nothing": 1})
    reference(deployment.prefills[0], prompt=PROMPT)  # Now only prefill has it in its cache.
    usage = deployment.complete(PROMPT).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0


def test_the_ranks_of_a_prefill_take_turns_and_decode_gets_the_rank(deployment: Deployment) -> None:
    deployment.up(nixl=True, ranks=3)
    for _ in range(6):
        assert deployment.complete(PROMPT).status_code == 200
    ranks = [request["headers"]["x-data-parallel-rank"] for request in deployment.prefills[0].requests()]
    assert ranks == ["0", "1", "2"] * 2
    asked = deployment.decodes[0].requests()
    ids = [request["body"]["kv_transfer_params"]["remote_engine_id"] for request in asked]
    assert [request_id[-4:] for request_id in ids] == ["_dp0", "_dp1", "_dp2"] * 2
    assert all("x-data-parallel-rank" not in request["headers"] for request in asked)


def test_more_requests_than_mooncake_has_slots_are_prefilled_at_once(deployment: Deployment) -> None:
    """A transfer waits for nothing at a prefill, so there is nothing to ration."""
    deployment.up(nixl=True, prefill={"hold": "prefill"}, transfer_slots=2)
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 2}
    connections = [deployment.proxy.open("/v1/completions", body) for _ in range(5)]
    deployment.prefills[0].wait(waiting=5)
    deployment.prefills[0].script(hold="")
    deployment.decodes[0].wait(finished=5)
    for connection in connections:
        connection.close()


def test_engines_get_an_id_without_a_comma(nixl: Deployment) -> None:
    """Decode's heartbeats would not name such a request: prefill's blocks could have other prompts when decode, which
    has a queue, pulls them."""
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 2}
    answer = nixl.proxy.http.post("/v1/completions", json=body, headers={"x-request-id": "a,b"})
    assert answer.status_code == 200
    assert answer.headers["x-request-id"] == "a,b"
    legs = [engine.requests()[0] for engine in (nixl.prefills[0], nixl.decodes[0])]
    assert [leg["headers"]["x-request-id"] for leg in legs] == ["a_b", "a_b"]


@pytest.mark.parametrize("name", ["a,b", "HB:a", "a\\u002cb"])
def test_the_id_of_a_response_cannot_be_what_nixl_misreads(nixl: Deployment, name: str) -> None:
    """The Responses API takes it from the body, as it is."""
    text = json.dumps({"model": MODEL, "input": PROMPT, "max_output_tokens": 2, "request_id": "?"}).replace("?", name)
    answer = nixl.proxy.http.post("/v1/responses", content=text)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "request_id")
    assert nixl.prefills[0].requests() == nixl.decodes[0].requests() == []


def test_other_apis_do_not_take_an_id_from_the_body(nixl: Deployment) -> None:
    assert nixl.complete(PROMPT, max_tokens=2, request_id="a,b").status_code == 200


def test_an_id_of_vllms_own_kind_is_one_for_a_response(nixl: Deployment) -> None:
    body = {"model": MODEL, "input": PROMPT, "max_output_tokens": 2, "request_id": "resp_0123-4.x"}
    assert nixl.proxy.http.post("/v1/responses", json=body).status_code == 200


# --- what the two legs of a request look like to vLLM's MoRIIOConnector in READ mode, and that KV really crosses


ADDRESS = "___prefill_addr_host:192.0.2.1,handshake:1,notify:2___decode_addr_x_" + "0" * 32


@pytest.fixture
def moriio(deployment: Deployment) -> Deployment:
    """One prefill, one decode."""
    return deployment.up(moriio=True)


def test_prefill_is_asked_to_keep_its_kv_under_a_new_id_each_time(moriio: Deployment) -> None:
    for _ in range(2):
        assert moriio.complete(PROMPT).status_code == 200
    asked = [request["body"]["kv_transfer_params"] for request in moriio.prefills[0].requests()]
    ids = {params.pop("transfer_id") for params in asked}
    assert len(ids) == 2
    assert all(params["do_remote_decode"] and not params["do_remote_prefill"] for params in asked)


def test_what_no_decode_has_seen_is_released_by_one(deployment: Deployment) -> None:
    """The decode that is chosen refuses the connection: prefill's blocks are not left to the end of `defer_timeout`."""
    deployment.up(moriio=True, decodes=2)
    prefill, first, second = deployment.fakes
    first.end()
    assert [deployment.complete(PROMPT).status_code for _ in range(2)] == [200, 200]
    prefill.wait(held=0)
    assert second.transferred() >= len(PROMPT)


@pytest.mark.parametrize("in_body", [False, True])
def test_a_client_cannot_send_decode_to_an_address(moriio: Deployment, in_body: bool) -> None:
    """Decode takes one from the request id before it looks at the parameters. The header, or the body of a response."""
    options: dict[str, Any] = {"request_id": ADDRESS} if in_body else {}
    headers = {} if in_body else {"x-request-id": ADDRESS}
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 2, **options}
    answer = moriio.proxy.http.post("/v1/completions", json=body, headers=headers)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "request_id")
    assert moriio.prefills[0].requests() == moriio.decodes[0].requests() == []


def test_an_escaped_address_is_an_address(moriio: Deployment) -> None:
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 2, "request_id": ADDRESS}
    text = json.dumps(body).replace("___prefill", "\\u005f__prefill").replace("___decode", "_\\u005f_decode")
    answer = moriio.proxy.http.post("/v1/completions", content=text)
    assert answer.status_code == 400


def test_a_long_id_in_a_body_is_refused(moriio: Deployment) -> None:
    """A list of 60 MB takes half a minute to read, in which no other client would be served."""
    assert moriio.complete(PROMPT, request_id="x" * 5000).status_code == 400
    raw = b'{"request_id":[1,,2]}'
    scan = Scan(raw)
    assert scan.step()
    assert chosen_ids.in_body(SimpleNamespace(body=Body(raw, scan))) == ""  # type: ignore[arg-type]
