"""What of a request's head, id and route reaches an engine, and what of an engine's other routes clients reach."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.proxy.deployment import MODEL, PLAIN, ROUND_ROBIN, Deployment, Fake, keys_file
from tests.proxy.raw import RawDeployment, post
from tests.tables import each_row

INPUT: dict[str, Any] = {"model": MODEL, "input": "hello world", "max_output_tokens": 4}
CHAT: list[dict[str, str]] = [{"role": "user", "content": "hello world"}]
KV = {"do_remote_prefill": True, "remote_bootstrap_addr": "http://127.0.0.1:1"}
DANGEROUS = {"kv_transfer_params": KV, "ec_transfer_params": {}, "vllm_xargs": {"kv_transfer_params": KV, "keep": 1}}


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch, deployment: Deployment) -> Deployment:
    """Two pairs whose decodes keep responses, asked in turn."""
    monkeypatch.setenv("VLLM_ENABLE_RESPONSES_API_STORE", "1")
    return deployment.up(2, 2, routing=ROUND_ROBIN)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with Deployment(tmp_path_factory.mktemp("proxy")) as deployment:
        yield deployment.up()


def respond(deployment: Deployment, **more: Any) -> dict[str, Any]:
    answer = deployment.proxy.http.post("/v1/responses", json=INPUT | more)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def bodies(fake: Fake) -> list[dict[str, Any]]:
    return [request["body"] for request in fake.requests()]


# --- answered by one engine, whole


def test_a_batch_of_chats_goes_to_one_engine(pair: Deployment) -> None:
    body = {"model": MODEL, "messages": [CHAT, CHAT, CHAT], "max_tokens": 3}
    answer = pair.proxy.http.post("/v1/chat/completions/batch", json=body)
    assert answer.status_code == 200, answer.text
    assert [choice["index"] for choice in answer.json()["choices"]] == [0, 1, 2]
    assert pair.prefills[0].requests() == []


@each_row("asked", [{"messages": CHAT}, {"prompt": "hello world"}])
@each_row("stream", [False, True])
def test_sagemakers_invocations_are_chats_or_completions(pair: Deployment, asked: dict[str, Any], stream: bool) -> None:
    body = {"model": MODEL, "max_tokens": 3, "stream": stream, **asked}
    answer = pair.proxy.http.post("/invocations", json=body)
    assert answer.status_code == 200, answer.text
    if stream:
        assert answer.text.endswith("data: [DONE]\n\n")
    else:
        assert answer.json()["object"] == ("chat.completion" if "messages" in asked else "text_completion")


def test_generative_scoring_is_passed_on(pair: Deployment) -> None:
    body = {"model": MODEL, "query": "is it?", "items": ["a", "b"], "label_token_ids": [1, 2]}
    answer = pair.proxy.http.post("/generative_scoring", json=body)
    assert [item["index"] for item in answer.json()["data"]] == [0, 1]


@each_row(
    "path, body",
    [
        ("/v1/chat/completions/batch", {"messages": [CHAT]}),
        ("/invocations", {"messages": CHAT}),
        ("/invocations", {"prompt": "hello"}),
    ],
)
def test_no_engine_gets_the_place_of_kv_that_a_client_names(pair: Deployment, path: str, body: dict[str, Any]) -> None:
    answer = pair.proxy.http.post(path, json={"model": MODEL, "max_tokens": 1, **body, **DANGEROUS})
    assert answer.status_code == 200, answer.text
    sent = bodies(pair.decodes[0])[-1]
    assert not {"kv_transfer_params", "ec_transfer_params"} & sent.keys()
    assert sent["vllm_xargs"] == {"keep": 1}


def test_a_stream_of_invocations_that_is_cut_does_not_look_complete(deployment: Deployment) -> None:
    deployment.up(decode={"drop_after": 2})
    body = {"model": MODEL, "prompt": "hello world", "max_tokens": 9, "stream": True}
    assert '"error"' in deployment.proxy.http.post("/invocations", json=body).text.split("\n\n")[-2]


# --- about the deployment


def test_version_ping_and_load(deployment: Deployment) -> None:
    pair = deployment.up(decode={"hold": "first"})
    http = pair.proxy.http
    assert http.get("/version").json() == pair.decodes[0].http.get("/version").json()
    assert [http.request(method, "/ping").status_code for method in ("GET", "POST")] == [200, 200]
    assert http.get("/load").json() == {"server_load": 0}
    with pair.proxy.open("/v1/completions", {"model": MODEL, "prompt": "hello", "max_tokens": 2}):
        pair.decodes[0].wait(received=1)
        assert http.get("/load").json() == {"server_load": 1}


def test_ping_and_version_show_when_no_engine_can_serve(deployment: Deployment) -> None:
    deployment.up(control=True)
    deployment.proxy.push("decode-0", "dead")
    for path in ("/ping", "/version"):
        answer = deployment.proxy.http.get(path)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")


# --- stored responses


def test_a_stored_response_is_fetched_from_whoever_has_it(store: Deployment) -> None:
    kept = [respond(store) for _ in range(4)]
    for response in kept:
        answer = store.proxy.http.get(f"/v1/responses/{response['id']}").json()
        assert (answer["id"], answer["output"]) == (response["id"], response["output"])
    assert {len(bodies(decode)) for decode in store.decodes} == {2}, "both decodes have some"


def test_a_background_response_can_be_followed_and_cancelled(store: Deployment) -> None:
    http = store.proxy.http
    for decode in store.decodes:
        decode.script(hold="first")
    done, cancelled = respond(store, background=True), respond(store, background=True)
    assert http.get(f"/v1/responses/{done['id']}").json()["status"] == "queued"
    answer = http.post(f"/v1/responses/{cancelled['id']}/cancel")
    assert (answer.status_code, answer.json()["status"]) == (200, "cancelled")
    with http.stream("GET", f"/v1/responses/{done['id']}?stream=true&starting_after=0") as stream:
        lines = stream.iter_lines()
        assert next(lines) == "event: response.created"
        for decode in store.decodes:
            decode.script(hold="")
        assert "event: response.completed" in lines
    assert http.get(f"/v1/responses/{done['id']}").json()["status"] != "queued"
    assert http.post(f"/v1/responses/{done['id']}/cancel").status_code == 400


def test_a_response_is_continued_where_it_is(store: Deployment) -> None:
    kept = [respond(store) for _ in range(4)]
    for response in kept * 2:
        respond(store, previous_response_id=response["id"])


def test_every_process_finds_a_stored_response(monkeypatch: pytest.MonkeyPatch, deployment: Deployment) -> None:
    monkeypatch.setenv("VLLM_ENABLE_RESPONSES_API_STORE", "1")
    deployment.up(1, 2, processes=3)
    response = respond(deployment)
    for _ in range(12):
        answer = httpx.get(f"{deployment.proxy.url}/v1/responses/{response['id']}", **PLAIN)
        assert answer.json()["output"] == response["output"]


def test_an_unknown_response_is_an_engines_404_but_not_while_one_does_not_answer(deployment: Deployment) -> None:
    http = deployment.up(1, 2).proxy.http
    continued = INPUT | {"previous_response_id": "resp_1"}
    for answer in (
        http.get("/v1/responses/resp_1"),
        http.post("/v1/responses/resp_1/cancel"),
        http.post("/v1/responses", json=continued),
    ):
        assert answer.status_code == 404
        error = answer.json()["error"]
        assert (error["message"], error["type"]) == ("Response with id 'resp_1' not found.", "invalid_request_error")
    deployment.decodes[0].end()
    assert http.get("/v1/responses/resp_1").status_code == 503


@each_row("method", ["POST", "DELETE"])
def test_a_stored_response_has_its_methods_only(pair: Deployment, method: str) -> None:
    assert pair.proxy.http.request(method, "/v1/responses/resp_1").status_code == 405
    assert pair.proxy.http.get("/v1/responses/resp_1/cancel").status_code == 405


@each_row("name", ["..%2f..%2freset_prefix_cache", "a.b", "a%20b", "x" * 257, "a/input_items"])
def test_only_an_id_is_passed_on(pair: Deployment, name: str) -> None:
    answer = pair.proxy.http.get(f"/v1/responses/{name}")
    assert answer.status_code == 404
    assert "this proxy has no route /v1/responses/" in answer.json()["error"]["message"]


def test_keys_figures_and_the_log_know_requests_for_stored_responses(
    monkeypatch: pytest.MonkeyPatch, deployment: Deployment, tmp_path: Path
) -> None:
    monkeypatch.setenv("VLLM_ENABLE_RESPONSES_API_STORE", "1")
    deployment.up(auth=keys_file(tmp_path, ("team", "secret"), requests_per_minute=2), log="json")
    http, key = deployment.proxy.http, {"authorization": "Bearer secret"}
    assert http.get("/v1/responses/resp_1").status_code == 401
    assert [http.get("/v1/responses/resp_1", headers=key).status_code for _ in range(3)] == [404, 404, 429]
    assert http.get("/version").status_code == http.get("/load").status_code == 401
    assert http.get("/ping").status_code == 200
    page = http.get("/metrics").text
    assert 'pdserve_proxy_requests_total{path="/v1/responses/{response_id}",status="404"} 2.0' in page
    entry = json.loads(deployment.proxy.until(r'^{.*"status": ?404').string)
    assert (entry["key"], entry["decision"], entry["decode"]) == ("team", "stored-response", "decode-0")


# --- what is not passed on


@each_row("path", ["/reset_prefix_cache", "/sleep", "/collective_rpc", "/v1/load_lora_adapter", "/x"])
def test_other_routes_of_an_engine_are_out_of_reach(pair: Deployment, path: str) -> None:
    answer = pair.proxy.http.post(path, json={})
    assert answer.status_code == 404
    error = {"message": f"Not Found: this proxy has no route {path}", "type": "NotFoundError"}
    assert answer.json() == {"error": {**error, "param": None, "code": 404}}


def test_an_api_that_the_engine_does_not_have_is_an_error_of_its_own(pair: Deployment) -> None:
    answer = pair.proxy.http.post("/v1/embeddings", json={"model": MODEL, "input": "x"})
    assert answer.status_code == 404
    assert answer.json()["error"]["message"] == "The engine does not offer this route for its model."


# --- without the split each engine answers alone; what prefill/decode must refuse is possible here


def test_all_engines_are_used_and_transfer_parameters_stripped(deployment: Deployment) -> None:
    deployment.up(aggregated=2)
    for _ in range(4):
        assert deployment.complete(kv_transfer_params={"do_remote_prefill": True}).status_code == 200
    for fake in deployment.aggregated:
        assert [request["body"].get("kv_transfer_params") for request in fake.requests()] == [None, None]
    deployment.aggregated[0].end()
    assert [deployment.complete().status_code for _ in range(3)] == [200, 200, 200]


# --- the head of a request


COMPLETIONS = "/v1/completions"
BODY: dict[str, Any] = {"model": "tiny", "prompt": "hi"}
RAW: dict[str, Any] = {"forward_headers": ["Baggage", "x-tenant"], "log": "json"}


def engine_headers(raw: RawDeployment) -> dict[str, str]:
    return dict(raw.engine.seen[-1].headers)


def test_headers_that_are_named_reach_engines_beside_the_usual_ones(raw: RawDeployment) -> None:
    sent = ("baggage: a=1", "X-Tenant: blue", "tracestate: b=2", "x-other: no", "cookie: no")
    assert raw.ask(post(COMPLETIONS, BODY, *sent)).status == 200
    got = engine_headers(raw)
    assert {name: got.get(name) for name in ("baggage", "x-tenant", "tracestate")} == {
        "baggage": "a=1",
        "x-tenant": "blue",
        "tracestate": "b=2",
    }
    assert not {"x-other", "cookie"} & got.keys()


@each_row(
    "path, given, headers, expected",
    [
        (COMPLETIONS, "body-id", (), "body-id"),
        ("/v1/chat/completions", "body-id", (), "body-id"),
        (COMPLETIONS, "body-id", ("x-request-id: from-head",), "from-head"),
        (COMPLETIONS, "two words", (), None),
        (COMPLETIONS, 7, (), None),
        (COMPLETIONS, "x" * 257, (), None),
        (COMPLETIONS, None, (), None),
        # Its engine takes it from the body, whatever a header says.
        ("/v1/responses", "body-id", (), None),
    ],
)
def test_a_request_may_be_named_in_its_body(
    raw: RawDeployment, path: str, given: object, headers: tuple[str, ...], expected: str | None
) -> None:
    answer = raw.ask(post(path, BODY | {"request_id": given, "messages": [{}], "input": "hi"}, *headers))
    assert answer.status == 200
    id_ = engine_headers(raw)["x-request-id"]
    assert answer.headers["x-request-id"] == id_
    assert (id_ == expected) if expected is not None else (id_ != given and len(id_) == 32)


def test_the_model_that_is_asked_for_is_in_the_log(raw: RawDeployment) -> None:
    raw.ask(post(COMPLETIONS, {"model": "adapter-7", "prompt": "hi"}, "x-request-id: of-adapter"))
    line = json.loads(raw.proxy.until('^{.*"of-adapter".*')[0])
    assert line["model"] == "adapter-7"


def test_errors_below_messages_have_anthropics_shape(raw: RawDeployment) -> None:
    error = raw.ask(post("/v1/messages/batches", {"requests": []}))
    assert (error.status, error.json()["type"], error.json()["error"]["type"]) == (404, "error", "not_found_error")
    assert "code" in raw.ask(post("/v1/message", BODY)).json()["error"]


def test_open_connections_are_counted(raw: RawDeployment) -> None:
    def counted() -> float:
        page = raw.ask(b"GET /metrics HTTP/1.1\r\nhost: proxy\r\n\r\n").body.decode()
        (value,) = [line.split(" ")[1] for line in page.splitlines() if line.startswith("pdserve_proxy_connections ")]
        return float(value)

    with raw.client() as first, raw.client():
        first.send(post(COMPLETIONS, BODY)).response()
        while counted() != 3:
            pass  # the page is made 20 times a second at most
