"""The two legs of a request as NixlConnector and MoRIIOConnector (in READ mode) see them, and that KV really crosses.

Mooncake's are in test_contract.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.proxy.deployment import MODEL, Deployment
from tests.proxy.test_contract import PROMPT, cached_tokens, reference

SPLITS: dict[str, dict[str, Any]] = {"nixl": {"nixl": True}, "moriio": {"moriio": True}}


@pytest.fixture(scope="module", params=SPLITS)
def split(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """One prefill, one decode, for all tests that only look. Each has a prompt of its own: engines have caches."""
    with Deployment(tmp_path_factory.mktemp("split")) as deployment:
        yield deployment.up(**SPLITS[request.param])


with_nixl = pytest.mark.parametrize("split", ["nixl"], indirect=True)
with_moriio = pytest.mark.parametrize("split", ["moriio"], indirect=True)


def numbers(split: Deployment) -> list[int]:
    """Return how many requests each engine has had."""
    return [len(fake.requests()) for fake in split.fakes]


def test_answers_as_one_engine_alone_and_decode_computes_nothing(split: Deployment) -> None:
    before = split.decodes[0].transferred()
    answer = split.complete(PROMPT)
    assert answer.status_code == 200
    assert split.decodes[0].transferred() == before + len(PROMPT)
    assert answer.json()["choices"][0]["text"] == reference(split.prefills[0], prompt=PROMPT)
    split.prefills[0].wait(held=0)


def test_a_client_cannot_name_a_remote(split: Deployment) -> None:
    evil = {"do_remote_prefill": True, "remote_host": "192.0.2.1", "remote_port": 1, "remote_engine_id": "x"}
    assert split.complete("evil", kv_transfer_params=evil | {"remote_handshake_port": 1}).status_code == 200
    assert not ["192.0.2.1" in fake.requests()[-1]["raw"] for fake in split.fakes].count(True)


def test_decode_gets_the_parameters_byte_for_byte(split: Deployment) -> None:
    """The fake writes a number as 10.0, or 1.0: whoever reads it and writes it anew may not."""
    split.complete("bytes", max_tokens=2, vendor=1.50)
    sent, _, params = split.decodes[0].requests()[-1]["raw"].partition(',"kv_transfer_params":')
    assert json.loads(sent + "}") == {"model": MODEL, "prompt": "bytes", "max_tokens": 2, "vendor": 1.50}
    assert params.startswith('{"do_remote_prefill": true, "do_remote_decode": false, "remote_block_ids": [[7, 8, 9]]')
    assert ('"remote_num_tokens": 10.0' if '"remote_num_tokens"' in params else '"tp_size": 1.0') in params


def test_decode_is_asked_only_after_prefill_has_answered(split: Deployment) -> None:
    prefill, decode = split.fakes
    before = decode.state()
    prefill.script(hold="prefill")
    with split.proxy.open("/v1/completions", {"model": MODEL, "prompt": "held", "max_tokens": 2}):
        prefill.wait(waiting=1)
        assert "x-data-parallel-rank" not in prefill.requests()[-1]["headers"], "it has one rank"
        assert decode.state()["received"] == before["received"]
        prefill.script(hold="")
        decode.wait(finished=before["finished"] + 1)


@pytest.mark.parametrize("way", SPLITS.values(), ids=SPLITS)
def test_where_prefill_keeps_nothing_decode_computes_the_prompt(deployment: Deployment, way: dict[str, Any]) -> None:
    """MoRI-IO keeps what ended by length alone."""
    deployment.up(**way, prefill={"keeps_nothing": 1} if "nixl" in way else {"eos": 2})
    reference(deployment.prefills[0], prompt=PROMPT)  # now only prefill has it in its cache
    answer = deployment.complete(PROMPT)
    deployment.prefills[0].script(eos=0)
    assert answer.json()["choices"][0]["text"] == reference(deployment.prefills[0], prompt=PROMPT)
    assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0, "decode's own"
    assert "kv_transfer_params" not in deployment.decodes[0].body()
    assert deployment.decodes[0].transferred() == 0


@with_nixl
def test_prefill_is_asked_to_keep_its_kv_and_knows_no_remote(split: Deployment) -> None:
    split.complete("kept", stream=True, max_tokens=5, stop=["x"])
    leg = split.prefills[0].requests()[-1]["body"]
    params = leg.pop("kv_transfer_params")
    assert {name: value for name, value in params.items() if value is not None} == {
        "do_remote_decode": True,
        "do_remote_prefill": False,
    }
    assert leg == {"model": MODEL, "prompt": "kept", "max_tokens": 1, "stream": False, "ignore_eos": True}


@pytest.mark.parametrize("eos", [1, 2])
def test_a_prefill_that_ends_by_stop_is_no_harm(deployment: Deployment, eos: int) -> None:
    deployment.up(nixl=True, prefill={"eos": eos})
    answer = deployment.complete(PROMPT)
    deployment.prefills[0].script(eos=0)
    assert answer.json()["choices"][0]["text"] == reference(deployment.prefills[0], prompt=PROMPT)
    deployment.idle()


@with_nixl
@pytest.mark.parametrize("stream", [False, True])
def test_cached_tokens_are_those_that_prefill_did_not_compute(split: Deployment, stream: bool) -> None:
    """Decode counts all that it has pulled as cached."""
    prompt = f"{stream}: {PROMPT}"
    assert cached_tokens(split, prompt, stream) == [0, len(prompt) // 16 * 16]


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


@with_nixl
def test_engines_get_an_id_without_a_comma(split: Deployment) -> None:
    """Decode's heartbeats would not name such a request: prefill's blocks could have other prompts when decode, which
    has a queue, pulls them."""
    body = {"model": MODEL, "prompt": "comma", "max_tokens": 2}
    answer = split.proxy.http.post("/v1/completions", json=body, headers={"x-request-id": "a,b"})
    assert answer.status_code == 200
    assert answer.headers["x-request-id"] == "a,b"
    assert [fake.requests()[-1]["headers"]["x-request-id"] for fake in split.fakes] == ["a_b", "a_b"]


@with_nixl
def test_the_id_of_a_response_cannot_be_what_nixl_misreads(split: Deployment) -> None:
    """The Responses API takes it from the body, as it is; other APIs do not."""
    before = numbers(split)
    for name in ("a,b", "HB:a", "a\\u002cb"):
        text = json.dumps({"model": MODEL, "input": PROMPT, "max_output_tokens": 2, "request_id": "?"})
        answer = split.proxy.http.post("/v1/responses", content=text.replace("?", name))
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "request_id"), name
    assert numbers(split) == before
    assert split.complete("in the body", max_tokens=2, request_id="a,b").status_code == 200
    body = {"model": MODEL, "input": "vLLM's own", "max_output_tokens": 2, "request_id": "resp_0123-4.x"}
    assert split.proxy.http.post("/v1/responses", json=body).status_code == 200


# --- what the two legs of a request look like to vLLM's MoRIIOConnector in READ mode, and that KV really crosses


ADDRESS = "___prefill_addr_host:192.0.2.1,handshake:1,notify:2___decode_addr_x_" + "0" * 32


@with_moriio
def test_prefill_is_asked_to_keep_its_kv_under_a_new_id_each_time(split: Deployment) -> None:
    assert [split.complete("twice").status_code for _ in range(2)] == [200, 200]
    asked = [request["body"]["kv_transfer_params"] for request in split.prefills[0].requests()[-2:]]
    assert len({params.pop("transfer_id") for params in asked}) == 2
    assert all(params["do_remote_decode"] and not params["do_remote_prefill"] for params in asked)


def test_what_no_decode_has_seen_is_released_by_one(deployment: Deployment) -> None:
    """The decode that is chosen refuses the connection: prefill's blocks are not left to the end of `defer_timeout`."""
    deployment.up(moriio=True, decodes=2)
    prefill, first, second = deployment.fakes
    first.end()
    assert [deployment.complete(PROMPT).status_code for _ in range(2)] == [200, 200]
    prefill.wait(held=0)
    assert second.transferred() >= len(PROMPT)


@with_moriio
def test_a_client_cannot_send_decode_to_an_address(split: Deployment) -> None:
    """Decode takes one from the request id before it looks at the parameters: the header, or the body of a response,
    also if it is written in escapes."""
    before = numbers(split)
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 2}
    text = json.dumps(body | {"request_id": ADDRESS})
    escaped = text.replace("___prefill", "\\u005f__prefill").replace("___decode", "_\\u005f_decode")
    for content, name in ((json.dumps(body), ADDRESS), (text, "mine"), (escaped, "")):
        answer = split.proxy.http.post("/v1/completions", content=content, headers={"x-request-id": name})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "request_id"), content
    assert numbers(split) == before


@with_moriio
def test_a_long_id_in_a_body_is_refused(split: Deployment) -> None:
    """A list of 60 MB takes half a minute to read, in which no other client would be served."""
    assert split.complete(PROMPT, request_id="x" * 5000).status_code == 400
