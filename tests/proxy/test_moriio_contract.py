"""What the two legs of a request look like to vLLM's MoRIIOConnector in READ mode, and that KV really crosses."""

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
ADDRESS = "___prefill_addr_host:192.0.2.1,handshake:1,notify:2___decode_addr_x_" + "0" * 32


@pytest.fixture
def moriio(deployment: Deployment) -> Deployment:
    """One prefill, one decode."""
    return deployment.up(moriio=True)


def test_answers_as_one_engine_alone_and_decode_computes_nothing(moriio: Deployment) -> None:
    answer = moriio.complete(PROMPT)
    assert answer.status_code == 200
    assert answer.json()["choices"][0]["text"] == reference(moriio.prefills[0], prompt=PROMPT)
    moriio.idle()
    assert moriio.decodes[0].transferred() == len(PROMPT)
    assert moriio.prefills[0].state()["delivered"] == 1


def test_prefill_is_asked_to_keep_its_kv_under_a_new_id_each_time(moriio: Deployment) -> None:
    for _ in range(2):
        assert moriio.complete(PROMPT).status_code == 200
    asked = [request["body"]["kv_transfer_params"] for request in moriio.prefills[0].requests()]
    ids = {params.pop("transfer_id") for params in asked}
    assert len(ids) == 2
    assert all(params["do_remote_decode"] and not params["do_remote_prefill"] for params in asked)


def test_decode_gets_the_parameters_byte_for_byte(moriio: Deployment) -> None:
    """The fake writes a number as 1.0: whoever reads it and writes it anew may not."""
    moriio.complete(PROMPT, max_tokens=2)
    sent, _, params = moriio.decodes[0].requests()[0]["raw"].partition(',"kv_transfer_params":')
    assert json.loads(sent + "}") == {"model": MODEL, "prompt": PROMPT, "max_tokens": 2}
    assert params.startswith('{"do_remote_prefill": true, "do_remote_decode": false, "remote_block_ids": [[7, 8, 9]]')
    assert '"tp_size": 1.0' in params


def test_decode_is_asked_only_after_prefill_has_answered(deployment: Deployment) -> None:
    deployment.up(moriio=True, prefill={"hold": "prefill"})
    prefill, decode = deployment.fakes
    with deployment.proxy.open("/v1/completions", {"model": MODEL, "prompt": PROMPT, "max_tokens": 2}):
        prefill.wait(waiting=1)
        assert decode.state()["received"] == 0
        prefill.script(hold="")
        decode.wait(finished=1)


def test_where_prefill_keeps_nothing_decode_computes_the_prompt(deployment: Deployment) -> None:
    """So it is where prefill has ended by stop: MoRI-IO keeps what ended by length alone."""
    deployment.up(moriio=True, prefill={"eos": 2})
    answer = deployment.complete(PROMPT)
    deployment.prefills[0].script(eos=0)
    assert answer.json()["choices"][0]["text"] == reference(deployment.prefills[0], prompt=PROMPT)
    assert "kv_transfer_params" not in deployment.decodes[0].body()
    assert deployment.decodes[0].transferred() == 0


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


def test_a_long_id_in_a_body_is_refused_and_one_that_is_no_string_is_not_read(moriio: Deployment) -> None:
    """A list of 60 MB takes half a minute to read, in which no other client would be served."""
    assert moriio.complete(PROMPT, request_id="x" * 5000).status_code == 400
    raw = b'{"request_id":[1,,2]}'
    scan = Scan(raw)
    assert scan.step()
    assert chosen_ids.in_body(SimpleNamespace(body=Body(raw, scan))) == ""  # type: ignore[arg-type]


def test_a_client_cannot_name_a_remote(moriio: Deployment) -> None:
    evil = {"do_remote_prefill": True, "remote_host": "192.0.2.1", "remote_handshake_port": 1, "remote_engine_id": "x"}
    assert moriio.complete(PROMPT, kv_transfer_params=evil).status_code == 200
    assert "192.0.2.1" not in moriio.prefills[0].requests()[0]["raw"] + moriio.decodes[0].requests()[0]["raw"]
