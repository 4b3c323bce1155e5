"""What a P/D proxy for Mooncake must do, seen from outside: a section for each way in which others were found to fail.

The numbers are those of the findings; the behaviour is shown on the real process in front of fake engines.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.proxy.deployment import KEY, MODEL, ROUND_ROBIN, Deployment, Fake
from tests.proxy.raw import post, raw_deployment

COMPLETIONS = "/v1/completions"


@pytest.fixture(scope="module")
def module_pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with Deployment(tmp_path_factory.mktemp("proxy")) as deployment:
        yield deployment.up(breaker={"failures": 1000})


@pytest.fixture
def pair(module_pair: Deployment) -> Iterator[Deployment]:
    """One prefill and one decode for all tests that only look at what is sent: nothing is left of them."""
    yield module_pair
    for fake in module_pair.fakes:
        fake.script(prefill_status=0, decode_status=0, kv_fails=0, eos=0)
    module_pair.idle()


BODY: dict[str, Any] = {"model": MODEL, "prompt": "hello world", "max_tokens": 8}
QUICK_HEALTH = {"interval_seconds": 0.1, "timeout_seconds": 30, "failures": 2}
"""For engines that are gone: they refuse connections at once. One that is only slow is not sick."""


def statuses(deployment: Deployment, count: int, **more: Any) -> list[int]:
    return [deployment.complete(f"prompt {index}", **more).status_code for index in range(count)]


# --- 3: a worker that fails costs no client anything while there is another


def refuses(fake: Fake) -> None:
    """Its port is closed."""
    fake.end()


def answers_500(fake: Fake) -> None:
    fake.script(**{f"{fake.role}_status": 500})


def drops(fake: Fake) -> None:
    """The connection ends without an answer: the process dies of its next request."""
    fake.script(die_at="request")


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("fail", [refuses, answers_500, drops])
def test_03_no_client_sees_the_failure_of_one_of_two_workers(
    deployment: Deployment, fail: Callable[[Fake], None], role: str
) -> None:
    deployment.up(2, 2, routing=ROUND_ROBIN)
    broken = (deployment.prefills if role == "prefill" else deployment.decodes)[0]
    fail(broken)
    for stream in (False, True):
        assert statuses(deployment, 6, stream=stream) == [200] * 6
    transfers = []
    for fake in deployment.fakes:
        if fake.process.poll() is None:
            fake.wait(running=0, waiting=0)
            # A decode that dies with a request has perhaps asked for its KV: prefill's own timeout frees that.
            assert fake.state()["held"] <= (fail is drops and role == "decode")
            if fake.role == "prefill":
                transfers += [request["body"]["kv_transfer_params"]["transfer_id"] for request in fake.requests()]
    assert len(set(transfers)) == len(transfers) >= 12, "each attempt is a new transfer"


# --- 4: the breaker of a worker that fails again and again opens, and closes again


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_04_the_breaker_opens_and_closes(deployment: Deployment, role: str) -> None:
    deployment.up(2, 2, routing=ROUND_ROBIN, breaker={"failures": 2, "open_seconds": 3})
    broken = (deployment.prefills if role == "prefill" else deployment.decodes)[0]
    answers_500(broken)
    while deployment.workers()[broken.name]["breaker"] != "open":
        assert deployment.complete().status_code == 200
    tried = broken.state()["received"]
    assert tried == 2
    broken.script(**{f"{role}_status": 0})
    while deployment.workers()[broken.name]["breaker"] == "open":
        assert deployment.complete().status_code == 200
    assert broken.state()["received"] > tried


def test_04_what_a_client_does_wrong_never_counts(deployment: Deployment) -> None:
    deployment.up(breaker={"failures": 1, "open_seconds": 60})
    assert {deployment.complete("x" * 100_001).status_code for _ in range(3)} == {400}
    assert {deployment.complete(model="other").status_code for _ in range(3)} == {404}
    assert {worker["breaker"] for worker in deployment.workers().values()} == {"closed"}
    assert deployment.complete().status_code == 200


# --- 5: alive is not ready, and a dead worker is noticed without a request


def test_05_ready_reports_what_health_does_not(deployment: Deployment) -> None:
    deployment.up(health=QUICK_HEALTH)
    http = deployment.proxy.http
    assert (http.get("/health").status_code, http.get("/ready").status_code) == (200, 200)
    deployment.decodes[0].end()
    deployment.proxy.until("decode-0 is not healthy")
    ready = http.get("/ready")
    assert (http.get("/health").status_code, ready.status_code) == (200, 503)
    assert ready.json()["empty_pools"] == ["decode"]
    assert int(ready.headers["retry-after"]) > 0
    refused = deployment.complete()
    assert (refused.status_code, int(refused.headers["retry-after"]) > 0) == (503, True)
    assert deployment.prefills[0].state()["received"] == 0


def test_05_a_dead_worker_is_left_alone_and_comes_back(deployment: Deployment) -> None:
    deployment.up(2, 1, routing=ROUND_ROBIN, health=QUICK_HEALTH)
    dead = deployment.prefills[0]
    dead.end()
    deployment.proxy.until("prefill-0 is not healthy")
    assert not deployment.workers()["prefill-0"]["healthy"]
    assert statuses(deployment, 4) == [200] * 4
    assert [request["path"] for request in deployment.decodes[0].requests()] == [COMPLETIONS] * 4, "no attempt failed"
    deployment.prefills[0] = deployment.engine(dead.name, "prefill", port=dead.port, bootstrap=dead.bootstrap)
    deployment.proxy.until("prefill-0 is healthy again")
    assert statuses(deployment, 4) == [200] * 4
    assert deployment.prefills[0].state()["finished"] == 2


def test_05_an_engine_that_answers_is_alive(deployment: Deployment) -> None:
    """One client's flood keeps an API server from a check, and must not take it from the others."""
    deployment.up(health={"interval_seconds": 0.1, "timeout_seconds": 1, "failures": 1})
    decode = deployment.decodes[0]
    decode.script(hold="health")
    beyond = decode.state()["checks"] + 3
    while decode.state()["checks"] < beyond:
        assert deployment.complete().status_code == 200
    decode.script(hold="")


def test_05_an_engine_that_goes_on_after_a_pause_is_used_at_once(deployment: Deployment) -> None:
    """However long it is between two checks of healthy ones."""
    deployment.up()
    decode = deployment.decodes[0]
    decode.process.send_signal(signal.SIGSTOP)
    with Deployment(deployment.folder) as other:
        workers = [fake.config().model_dump() for fake in deployment.fakes]
        other.up(0, 0, workers=workers, health={"interval_seconds": 3600, "timeout_seconds": 0.5, "failures": 1})
        other.proxy.until("decode-0 is not healthy")
        decode.process.send_signal(signal.SIGCONT)
        other.proxy.until("decode-0 is healthy again")
        assert other.complete().status_code == 200


def test_05_an_engine_with_slow_metrics_serves_on(deployment: Deployment) -> None:
    """Two engines on two busy cores have taken more than 3 s for /metrics."""
    deployment.up(health=QUICK_HEALTH | {"timeout_seconds": 3, "failures": 1})
    deployment.decodes[0].script(hold="metrics")
    deployment.proxy.until("decode-0: no new figure of its KV use")
    assert deployment.workers()["decode-0"]["healthy"]
    assert deployment.complete().status_code == 200


def test_05_an_engine_without_sockets_is_left_alone_until_it_has_some(deployment: Deployment) -> None:
    """It answers its checks, and every request that it is sent fails."""
    deployment.up(2, 1, routing=ROUND_ROBIN, health=QUICK_HEALTH, prefill={"out_of_sockets": 7})
    times = 7
    while deployment.workers()["prefill-0"]["healthy"]:
        times += 1
        deployment.prefills[0].script(out_of_sockets=times)
    deployment.proxy.until("prefill-0 is out of sockets or file descriptors")
    deployment.proxy.until("prefill-0 is healthy again")
    assert deployment.workers()["prefill-1"]["healthy"], "what was before the first look is no news"
    assert statuses(deployment, 4) == [200] * 4


# --- 8: a request reaches decode as its client wrote it

WRITTEN = (
    '{"model":"tiny" , "zeta": 1, "messages":[{"role":"user","content":"caf\\u00e9 \U0001f600 \\/"}],\n'
    ' "temperature":0.123456789012345678, "top_p":1.0, "seed":1e3, "max_tokens": 4,\t"alpha": {"b":2,"a":[1.50,-0.0]},'
    '"tools":[{"type":"function","function":{"name":"f","strict":true,"parameters":{"type":"object"}}}],'
    '"tool_choice":"auto", "response_format":{"type":"text"}, "chat_template_kwargs":{"thinking":true}, '
    '"cache_salt":"salt", "truncate_prompt_tokens":50, "vendor_field": null, "metadata": {"k": "v"}, "user": "me", '
    '"stop":["a"], "stop_token_ids":[5], "min_tokens":2, "ignore_eos":false, "logprobs":true, "top_logprobs":3 }'
)


def test_08_decode_gets_the_body_byte_for_byte(pair: Deployment) -> None:
    assert pair.proxy.http.post("/v1/chat/completions", content=WRITTEN.encode()).status_code == 200
    raw = pair.decodes[0].requests()[-1]["raw"]
    members, transfer = WRITTEN.rstrip(" }"), pair.decodes[0].requests()[-1]["body"]["kv_transfer_params"]
    assert raw.startswith(members + ',"kv_transfer_params":')
    assert json.loads(raw[len(members) + len(',"kv_transfer_params":') :].rstrip(" }") + "}") == transfer
    assert list(json.loads(raw)) == [*json.loads(WRITTEN), "kv_transfer_params"]
    # Prefill keeps all that shapes the prompt as it was written, and computes one token that only its length ends.
    leg, raw = (pair.prefills[0].requests()[-1][form] for form in ("body", "raw"))
    assert (leg["max_tokens"], leg["stream"], leg["ignore_eos"]) == (1, False, True)
    assert not {"stop", "stop_token_ids", "min_tokens", "logprobs", "top_logprobs"} & leg.keys()
    assert raw.startswith(WRITTEN[: WRITTEN.index(', "max_tokens"')])
    assert WRITTEN[WRITTEN.index('"alpha"') : WRITTEN.index(', "metadata"')] in raw


# --- 9: who asks stays visible, as far as the operator wants it


@pytest.mark.parametrize(
    ("setting", "seen"), [("replace", [f"Bearer {KEY}"]), ("forward", ["Bearer of-a-client=="]), ("drop", [])]
)
def test_09_authorization_is_what_the_operator_configures(tmp_path: Path, setting: str, seen: list[str]) -> None:
    with raw_deployment(tmp_path, split=True, auth={"client_authorization": setting}) as raw:
        assert raw.ask(post(COMPLETIONS, BODY, "authorization: Bearer of-a-client==")).status == 200
        for engine in raw.engines:
            (request,) = engine.seen
            assert [value for name, value in request.headers if name.lower() == "authorization"] == seen


@pytest.mark.parametrize("stream", [False, True])
def test_09_one_request_id_everywhere_and_the_trace_goes_on(pair: Deployment, stream: bool) -> None:
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    headers = {"x-request-id": "mine-42", "traceparent": trace, "tracestate": "a=1", "x-session-id": "session"}
    answer = pair.proxy.http.post(COMPLETIONS, json=BODY | {"stream": stream}, headers=headers)
    assert answer.headers["x-request-id"] == "mine-42"
    for fake in pair.fakes:
        request = fake.requests()[-1]
        assert {name: request["headers"][name] for name in headers} == headers
    pair.proxy.until("mine-42")
    wrong = pair.proxy.http.post(COMPLETIONS, content=b"{", headers={"x-request-id": "mine-43"})
    assert (wrong.status_code, wrong.headers["x-request-id"]) == (400, "mine-43")


# --- 11: errors are JSON in the shape of the API, and say nothing internal


PATHS = {
    COMPLETIONS: BODY,
    "/v1/chat/completions": {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8},
    "/v1/responses": {"model": MODEL, "input": "hi", "max_output_tokens": 8},
    "/v1/messages": {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8},
}


@pytest.mark.parametrize(
    ("role", "fault"),
    [("prefill", {"prefill_status": 500}), ("decode", {"decode_status": 503}), ("decode", {"kv_fails": 1})],
)
def test_11_errors_are_in_the_shape_of_their_api(pair: Deployment, role: str, fault: dict[str, int]) -> None:
    (pair.prefills if role == "prefill" else pair.decodes)[0].script(**fault)
    shapes_are_right(pair)


def test_11_nor_is_there_an_address_in_the_error_of_a_dead_worker(deployment: Deployment) -> None:
    deployment.up(breaker={"failures": 1000})
    deployment.prefills[0].end()
    shapes_are_right(deployment)


def shapes_are_right(deployment: Deployment) -> None:
    for path, body in PATHS.items():
        for stream in (False, True):
            answer = deployment.proxy.http.post(path, json=body | {"stream": stream})
            assert answer.status_code in (500, 502, 503)
            assert answer.headers["content-type"] == "application/json"
            document = answer.json()
            if path == "/v1/messages":
                kind = "overloaded_error" if answer.status_code == 503 else "api_error"
                assert (document["type"], document["error"]["type"]) == ("error", kind)
            else:
                assert set(document["error"]) == {"message", "type", "param", "code"}
                assert document["error"]["code"] == answer.status_code
            assert "127.0.0.1" not in answer.text
            assert str(deployment.prefills[0].port) not in answer.text


# --- 13: too much is a 429 that says when to come again


def test_13_a_full_pool_is_a_429_with_retry_after_and_json(deployment: Deployment) -> None:
    limits = {"decode": {"max_requests": 1, "queue_size": 1}}
    deployment.up(decode={"hold": "first"}, admission=limits)
    with deployment.proxy.open(COMPLETIONS, BODY) as running:
        deployment.decodes[0].wait(running=1)
        with deployment.proxy.open(COMPLETIONS, BODY) as queued:
            deployment.proxy.shows('queue_depth{pool="decode"} 1')
            refused = deployment.complete()
            assert refused.status_code == 429
            assert int(refused.headers["retry-after"]) > 0
            assert refused.json()["error"]["code"] == 429
            assert deployment.decodes[0].state()["received"] == 1, "a hard limit"
            deployment.decodes[0].script(hold="")
            for connection in (running, queued):
                assert connection.recv(65_536).startswith(b"HTTP/1.1 200 ")
    deployment.idle()
