"""A request that crashes engines costs its own client an error, and the others nothing: no worker leaves routing, no
connection is lost to it, and nothing is kept for it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.proxy.deployment import KEY, Deployment, Fake
from tests.proxy.test_failures import error_of

ROUND_ROBIN = {"prefill": {"kind": "round_robin"}, "decode": {"kind": "round_robin"}}
POISON = {"poisonous": True}
AT_ONCE = {"failures": 1, "open_seconds": 600}
"""A breaker that opens at the first failure and does not close."""


def open_breakers(deployment: Deployment) -> list[str]:
    listed = deployment.proxy.http.get("/workers").json()["workers"]
    return [worker["name"] for worker in listed if worker["breaker"] != "closed"]


def poisoned(fakes: list[Fake]) -> list[Fake]:
    for fake in fakes:
        fake.script(poison="poisonous")
    return fakes


def received(fakes: list[Fake]) -> int:
    return sum("poisonous" in request["body"] for fake in fakes for request in fake.requests())


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_lone_worker_is_not_left_alone_for_answers_that_it_gave(deployment: Deployment, role: str) -> None:
    deployment.up(breaker=AT_ONCE)
    poisoned(deployment.prefills if role == "prefill" else deployment.decodes)
    for _ in range(5):
        assert deployment.complete(**POISON).status_code == 500
        assert deployment.complete().status_code == 200
    assert open_breakers(deployment) == []
    deployment.idle()


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_what_fails_on_two_workers_is_tried_on_no_third_and_blames_no_worker(deployment: Deployment, role: str) -> None:
    deployment.up(3, 3, routing=ROUND_ROBIN, breaker=AT_ONCE)
    fakes = poisoned(deployment.prefills if role == "prefill" else deployment.decodes)
    for times in range(1, 4):
        answer = deployment.complete(**POISON)
        assert (answer.status_code, error_of(answer)["message"]) == (500, "'str' object has no attribute 'get'")
        assert received(fakes) == 2 * times
    assert open_breakers(deployment) == []
    assert {deployment.complete().status_code for _ in range(6)} == {200}
    deployment.idle()


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_worker_that_answers_others_is_not_left_alone(deployment: Deployment, role: str) -> None:
    """Only one of two fails with it, and the other one answers it: it is to blame, and of use all the same."""
    deployment.up(2, 2, routing=ROUND_ROBIN, breaker=AT_ONCE)
    fakes = deployment.prefills if role == "prefill" else deployment.decodes
    poisoned(fakes[:1])
    assert {deployment.complete().status_code for _ in range(4)} == {200}
    assert {deployment.complete(**POISON).status_code for _ in range(6)} == {200}
    assert received(fakes[:1]) > 1
    assert open_breakers(deployment) == []


def test_a_crash_that_can_be_seen_coming_costs_one_engine_only(deployment: Deployment) -> None:
    deployment.up()
    fields = [{"structured_outputs": "x"}, {"response_format": []}, {"logit_bias": 1}, {"stream_interval": 10**30}]
    for field in fields:
        deployment.complete(**field)
    assert deployment.prefills[0].state()["received"] == 0
    body = {"model": "tiny", "prompt": "hello world", "max_tokens": 8}
    assert [request["body"] for request in deployment.decodes[0].requests()] == [body | field for field in fields]


def test_a_worker_that_answers_no_request_is_left_alone(deployment: Deployment) -> None:
    deployment.up(2, 2, routing=ROUND_ROBIN, breaker=AT_ONCE)
    deployment.decodes[0].script(decode_status=500)
    assert {deployment.complete().status_code for _ in range(6)} == {200}
    assert open_breakers(deployment) == ["decode-0"]
    assert [request["path"] for request in deployment.decodes[0].requests()] == ["/v1/completions"]


@pytest.mark.parametrize("nixl", [False, True], ids=["mooncake", "nixl"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_connection_that_an_engine_has_closed_costs_no_client_an_answer(
    deployment: Deployment, stream: bool, nixl: bool
) -> None:
    """There is one worker of each role: nobody else could answer."""
    deployment.up(nixl=nixl, breaker=AT_ONCE, prefill={"stale": 1}, decode={"stale": 1})
    assert {deployment.complete(stream=stream).status_code for _ in range(6)} == {200}
    assert open_breakers(deployment) == []
    assert [fake.state()["received"] for fake in deployment.fakes] == [6, 6]
    deployment.idle()


def test_a_wrong_key_that_is_forwarded_is_its_clients_401(deployment: Deployment) -> None:
    deployment.up(breaker=AT_ONCE, auth={"client_authorization": "forward"})
    body = {"prompt": "hello", "max_tokens": 2}

    def ask(key: str) -> Any:
        return deployment.proxy.http.post("/v1/completions", json=body, headers={"authorization": f"Bearer {key}"})

    for _ in range(3):
        answer = ask("not the key")
        assert (answer.status_code, error_of(answer)["type"]) == (401, "UnauthorizedError")
        assert ask(KEY).status_code == 200
    assert open_breakers(deployment) == []


# --- what is refused holds nothing


def test_what_decodes_http_layer_alone_refuses_leaves_no_kv_at_prefill(deployment: Deployment) -> None:
    """Prefill's leg has no stop words: it computes a prompt that nobody will ask for. Of itself decode says nothing."""
    deployment.up()
    for _ in range(3):
        assert deployment.complete(stop=["a"] * 5).status_code == 400
    deployment.idle()
    assert deployment.complete().status_code == 200


def test_a_prefill_that_computes_on_is_left_when_decode_refuses(deployment: Deployment) -> None:
    deployment.up(prefill={"hold": "prefill"})
    assert deployment.complete(stop=["a"] * 5).status_code == 400
    deployment.prefills[0].wait(aborted=1, waiting=0, held=0)


# --- what can be known is refused before any leg


def served(deployment: Deployment) -> None:
    """The proxy knows what its engines serve."""
    for _ in deployment.fakes:
        deployment.proxy.until(r"(prefill|decode)-0 serves tiny")


def test_what_every_engine_would_refuse_reaches_none(deployment: Deployment) -> None:
    deployment.up()
    served(deployment)
    for path, body, message in (
        ("/v1/chat/completions", {"messages": []}, "empty conversation"),
        ("/v1/messages", {"messages": [], "max_tokens": 3}, "empty conversation"),
        ("/v1/completions", {"prompt": [7] * 100_001}, "contains 100001 input tokens"),
    ):
        answer = deployment.proxy.http.post(path, json={"model": "tiny"} | body)
        assert (answer.status_code, message in answer.json()["error"]["message"]) == (400, True), path
    assert [fake.state()["received"] for fake in deployment.fakes] == [0, 0]


def test_an_unknown_model_is_asked_for_once_and_then_refused(deployment: Deployment) -> None:
    """Once, because an engine may have loaded an adapter since."""
    deployment.up(moments={"pdserve.pd.workers.catalog.ASK_AGAIN_SECONDS": 600})
    served(deployment)
    answers = [deployment.complete(model="other") for _ in range(3)]
    assert {answer.status_code for answer in answers} == {404}
    assert error_of(answers[-1]) == {
        "message": "The model `other` does not exist. Valid aliases: tiny.",
        "type": "NotFoundError",
        "param": "model",
        "code": 404,
    }
    assert [fake.state()["received"] for fake in deployment.fakes] == [1, 1]

    # One of megabytes is refused by its beginning.
    error = error_of(deployment.complete(model='\u00e9"' * 60_000))
    assert (error["code"], error["type"]) == (404, "NotFoundError")
    assert error["message"].startswith('The model `\u00e9\\"')
    assert len(error["message"]) < 600


def test_a_request_that_names_no_model_is_served(deployment: Deployment) -> None:
    deployment.up()
    served(deployment)
    assert [deployment.complete([7] * 9, model=model).status_code for model in (None, "", "tiny")] == [200] * 3
