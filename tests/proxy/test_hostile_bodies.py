"""Bodies that are too large, no JSON, in another encoding, or ask for what no engine should do: refused in the API's
shape, or answered by one engine, and the proxy serves on.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.proxy.deployment import KEY, MODEL, Deployment
from tests.proxy.raw import (
    ANSWER,
    BODY,
    HEAD,
    MEGABYTE,
    PATH,
    SECONDS,
    RawDeployment,
    chunk,
    post,
    raw_deployment,
)
from tests.tables import each_row


def test_a_length_over_the_limit_is_refused_before_the_body_is_sent(raw: RawDeployment) -> None:
    with raw.client() as client:
        answer = client.send(HEAD + b"expect: 100-continue\r\ncontent-length: 3000000\r\n\r\n").response()
    assert (answer.status, answer.json()["error"]["code"]) == (413, 413)


@each_row("offer", [b"", b"connection: Upgrade\r\nupgrade: h2c\r\n"])
def test_a_chunked_body_is_refused_once_it_is_too_large(raw: RawDeployment, offer: bytes) -> None:
    with raw.client() as client:
        client.send(HEAD + offer + b"transfer-encoding: chunked\r\n\r\n")
        client.flood(chunk(b"x" * 65_536), 64 * MEGABYTE)
        assert client.response().status == 413
    assert raw.engine.seen == []


@each_row(
    "request_line, status",
    [
        ("POST /health", 405),
        ("GET /v1/models", 405),
        ("POST /v1/nothing", 404),
    ],
)
def test_an_unwanted_body_is_refused_before_it_is_sent(raw: RawDeployment, request_line: str, status: int) -> None:
    with raw.client() as client:
        client.send(f"{request_line} HTTP/1.1\r\nhost: proxy\r\ncontent-length: 1000000\r\n\r\n".encode())
        answer = client.response()
        assert (answer.status, answer.headers["connection"]) == (status, "close")


def test_bodies_behind_a_running_request_stay_with_their_client(raw: RawDeployment) -> None:
    release = raw.hold()
    large = post(PATH, b'{"prompt": "' + b"x" * (2 * MEGABYTE - 100) + b'"}')
    with raw.client() as client:
        before = raw.resident()
        client.send(post(PATH, BODY))
        raw.engine.wait(lambda engine: len(engine.seen) == 1)
        client.flood(large, 64 * MEGABYTE)
        assert raw.resident() - before < 6 * MEGABYTE
        release.set()
        assert client.response().body == ANSWER


def completion(size: int) -> bytes:
    return post(PATH, b'{"prompt": "%b"}' % (b"x" * size))


TIGHT: dict[str, Any] = {"limits": {"max_buffered_bytes": 5 * MEGABYTE}, "max_body_bytes": 2 * MEGABYTE}


def test_large_requests_beyond_the_budget_get_503(tmp_path: Path) -> None:
    with raw_deployment(tmp_path, **TIGHT) as raw:
        release = raw.hold()
        with raw.client() as first, raw.client() as second, raw.client() as small:
            first.send(post(PATH, BODY))
            second.send(completion(2 * MEGABYTE - 100))
            raw.engine.wait(lambda engine: len(engine.seen) == 2)
            answer = raw.ask(completion(2 * MEGABYTE - 100))
            assert (answer.status, answer.headers["retry-after"], answer.json()["error"]["code"]) == (503, "1", 503)
            small.send(completion(10_000))
            release.set()
            assert [client.response().body for client in (first, second, small)] == [ANSWER] * 3
        assert raw.ask(completion(2 * MEGABYTE - 100)).status == 200


def test_requests_that_never_end_leave_the_budget_free(tmp_path: Path) -> None:
    whole = completion(2 * MEGABYTE - 100)
    with raw_deployment(tmp_path, **TIGHT) as raw:
        for piece in (whole[:MEGABYTE], whole, post("/v1/nothing", b"x" * MEGABYTE), whole + b"x"):
            for leave in ("close", "reset"):
                for _ in range(4):
                    client = raw.client()
                    with suppress(OSError):
                        client.send(piece)
                    getattr(client, leave)()
        deadline = time.monotonic() + SECONDS
        while raw.ask(whole).status != 200:
            assert time.monotonic() < deadline
        raw.unharmed()


@each_row("content_type", ["text/plain", "application/x-www-form-urlencoded", "application/jsonp", ""])
def test_another_content_type_is_refused_in_vllms_words(raw: RawDeployment, content_type: str) -> None:
    answer = raw.ask(post(PATH, BODY, f"content-type: {content_type}"))
    assert (answer.status, answer.json()["error"]) == (
        400,
        {
            "message": "1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed",
            "type": "Bad Request",
            "param": None,
            "code": 400,
        },
    )
    assert raw.engine.seen == []


@each_row("content_type", ["application/json; charset=utf-8", "Application/JSON", "application/json;"])
def test_json_is_json_however_it_is_called(raw: RawDeployment, content_type: str) -> None:
    assert raw.ask(post(PATH, BODY, f"content-type: {content_type}")).status == 200


@each_row("encoding", ["utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-be"])
def test_engines_get_utf_8_whatever_the_client_has_sent(raw: RawDeployment, encoding: str) -> None:
    text = '{"prompt": "hé 😀"}'
    assert raw.ask(post(PATH, text.encode(encoding))).status == 200
    assert raw.engine.seen[-1].body == text.encode()


def test_a_large_body_may_have_a_byte_order_mark(raw: RawDeployment) -> None:
    text = '{"prompt": "' + "é" * 400_000 + '"}'
    assert raw.ask(post(PATH, text.encode("utf-8-sig"))).status == 200
    assert raw.engine.seen[-1].body == text.encode()
    assert raw.ask(post(PATH, text.encode("utf-16"))).status == 400


def test_a_large_list_of_tokens_takes_a_few_times_its_size_in_memory(tmp_path: Path) -> None:
    with raw_deployment(tmp_path, split=True, max_body_bytes=64 * MEGABYTE) as raw:
        body = b'{"prompt": [' + b"1," * (12 * MEGABYTE) + b"1]}"
        before = raw.resident()
        # A scripted prefill gives no transfer parameters back: what counts is what both were sent.
        raw.ask(post(PATH, body))
        assert all(engine.seen[-1].body.startswith(b'{"prompt": [1,1,') for engine in raw.engines)
        assert raw.proxy.memory("VmHWM") - before < 4 * len(body)


BROKEN: dict[str, bytes] = {
    "empty": b"",
    "half": b'{"prompt": "a"',
    "trailing": b'{"prompt": "a"} x',
    "nested lists": b'{"prompt": ' + b"[" * 500_000 + b"]" * 500_000 + b"}",
    "never closed": b'{"prompt": ' + b"[" * 1_000_000,
    "a list": b"[]",
    "not a number": b'{"prompt": NaN}',
    "twice, escaped": b'{"prompt": "a", "\\u0070rompt": "a"}',
    "no UTF-8": b'{"prompt": "\xff"}',
}


@each_row("path", [PATH, "/v1/chat/completions", "/v1/responses", "/v1/messages"])
@each_row("body", BROKEN.values())
def test_a_body_that_is_no_json_object_is_a_400_in_the_apis_own_shape(
    raw: RawDeployment, path: str, body: bytes
) -> None:
    answer = raw.ask(post(path, body))
    assert answer.status == 400
    assert answer.headers["content-type"] == "application/json"
    error = answer.json()["error"]
    if path == "/v1/messages":
        assert (answer.json()["type"], error["type"]) == ("error", "invalid_request_error")
    else:
        assert (error["type"], error["code"], error["param"]) == ("BadRequestError", 400, None)
    assert error["message"]
    assert raw.engine.seen == []


CHAT = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """One deployment for all of this module: nothing here may harm it."""
    with Deployment(tmp_path_factory.mktemp("proxy")) as deployment:
        yield deployment.up(max_body_bytes=200_000)


def judged_by_an_engine(shared: Deployment, path: str, body: dict[str, Any]) -> httpx.Response:
    """The answer to a request that only decode has seen, byte for byte as the client sent it: what decode says."""
    raw = json.dumps(body).encode()
    untouched = shared.prefills[0].state()["received"]
    answer = shared.proxy.http.post(path, content=raw)
    seen = shared.decodes[0].requests()[-1]
    assert shared.prefills[0].state()["received"] == untouched
    assert seen["raw"] == raw.decode()
    alone = shared.decodes[0].http.post(path, content=raw, headers={"authorization": f"Bearer {KEY}"})
    assert answer.status_code == alone.status_code
    if answer.status_code == 200 and not answer.headers["content-type"].startswith("text/event-stream"):
        assert answer.json()["choices"] == alone.json()["choices"]
    return answer


@each_row(
    "field, value",
    [
        ("n", 2),
        ("best_of", 2),
        ("use_beam_search", True),
        ("prompt_logprobs", 0),
        ("truncate_prompt_tokens", -1),
        ("prompt_embeds", "AAAA"),
        ("stream", "true"),
        ("max_tokens", 0),
        ("min_tokens", -1),
        ("stop", 7),
        ("stop_token_ids", ["a"]),
        ("stream_options", {"include_usage": True}),
        ("logprobs", True),
        ("ignore_eos", "yes"),
        ("return_token_ids", 1),
        ("logprob_token_ids", 1),
        ("stream_interval", 0),
        ("structured_outputs", "x"),
        ("response_format", []),
        ("logit_bias", 1),
        ("echo", True),
    ],
)
def test_completions_fields_for_one_engine(shared: Deployment, field: str, value: object) -> None:
    judged_by_an_engine(shared, "/v1/completions", {"prompt": "hi", field: value})


@each_row("prompt", [["a", "b"], [[1], [2]], [1, "a"], [], None, 5, {"a": 1}])
def test_prompts_that_are_not_one_prompt_go_to_one_engine(shared: Deployment, prompt: object) -> None:
    answer = judged_by_an_engine(shared, "/v1/completions", {"prompt": prompt})
    if isinstance(prompt, list) and len(prompt) == 2 and prompt != [1, "a"]:
        assert len(answer.json()["choices"]) == 2


@each_row(
    "field, value",
    [("messages", None), ("messages", "hi"), ("n", 3), ("logprobs", 5), ("echo", True), ("prompt_logprobs", 1)],
)
def test_chat_fields_for_one_engine(shared: Deployment, field: str, value: object) -> None:
    judged_by_an_engine(shared, "/v1/chat/completions", CHAT | {field: value})


@each_row("name", ["kv_transfer_params", r"\u006bv_transfer_params", "ec_transfer_params"])
def test_smuggled_transfer_parameters_reach_no_engine(shared: Deployment, name: str) -> None:
    """Sent on, these kill a producer's EngineCore."""
    body = (
        f'{{"model": "{MODEL}", "prompt": "hi", "{name}": {{"do_remote_prefill": true, "evil": 1}}, "max_tokens": 2}}'
    )
    assert shared.proxy.http.post("/v1/completions", content=body).status_code == 200
    for fake in shared.fakes:
        sent = fake.requests()[-1]["body"]
        assert "evil" not in json.dumps(sent)
        assert "ec_transfer_params" not in sent
        assert fake.process.poll() is None


@each_row("request_id", ["", "a b", "é", "x" * 300])
def test_a_request_id_that_could_do_harm_is_replaced(shared: Deployment, request_id: str) -> None:
    headers = [(b"x-request-id", request_id.encode("latin-1"))]
    answer = shared.proxy.http.post("/v1/completions", json={"prompt": "hi"}, headers=headers)
    assert answer.status_code == 200
    assert answer.headers["x-request-id"] not in ("", request_id)
