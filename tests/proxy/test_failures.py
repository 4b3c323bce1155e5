"""A failure becomes a clear answer at once: a status before the first byte, an SSE event after it. A client that leaves
at any moment leaves no running request and no KV behind, beyond what only a lease can free.
"""

from __future__ import annotations

import json
import signal
import socket
from typing import Any

import httpx
import pytest

from pdserve.pd.requests.body import EASY_BYTES
from tests.proxy.deployment import MODEL, Deployment
from tests.proxy.test_contract import PROMPT, reference


def error_of(answer: httpx.Response) -> dict[str, Any]:
    """The error of an answer, which must be in OpenAI's shape and name no address."""
    assert answer.headers["content-type"] == "application/json"
    (name, error), *more = answer.json().items()
    assert (name, more) == ("error", [])
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == answer.status_code
    assert "127.0.0.1" not in error["message"]
    return dict(error)


def last_event(lines: list[str]) -> dict[str, Any]:
    events = [line.removeprefix("data: ") for line in lines if line]
    return dict(json.loads(events[-1]))


def test_a_decode_failure_keeps_its_status_and_prefill_is_left(deployment: Deployment) -> None:
    deployment.up(prefill={"hold": "prefill"})
    assert deployment.complete(stop=["a"] * 5).status_code == 400
    deployment.prefills[0].wait(aborted=1, waiting=0, held=0)
    deployment.decodes[0].script(decode_status=503)
    assert deployment.complete().status_code == 503
    deployment.prefills[0].wait(aborted=2, waiting=0, held=0)


def test_a_decode_whose_prefill_is_gone_is_not_to_blame(deployment: Deployment) -> None:
    """The other failure is not always heard first: here a stranger on the prefill's port accepts and says nothing."""
    deployment.up(prefills=2)
    assert [deployment.complete().status_code for _ in range(2)] == [200, 200]
    gone = deployment.prefills[0]
    gone.end()
    with socket.create_server(("127.0.0.1", gone.port)):
        assert [deployment.complete().status_code for _ in range(2)] == [200, 200]
    deployment.decodes[0].wait(waiting=0, running=0)


def test_a_restarted_prefill_is_used_with_its_new_engine_id(deployment: Deployment) -> None:
    """Nobody tells the proxy: decode's failure does."""
    deployment.up()
    old = deployment.prefills[0]
    before = deployment.complete().json()["choices"]
    old.end()
    deployment.prefills[0] = deployment.engine(old.name, "prefill", port=old.port, bootstrap=old.bootstrap)
    answer = deployment.complete()
    assert answer.status_code == 200
    assert answer.json()["choices"] == before
    deployment.idle()


def test_no_bootstrap_server_is_a_clear_502(deployment: Deployment) -> None:
    deployment.up()
    prefill = deployment.prefills[0]
    stranger = {"name": prefill.name, "role": "prefill", "url": prefill.url, "bootstrap_url": "http://127.0.0.1:1"}
    with Deployment(deployment.folder) as other:
        other.up(0, 0, workers=[stranger, deployment.decodes[0].config().model_dump()])
        answer = other.complete()
        assert answer.status_code == 502
        assert "bootstrap server of prefill-0" in error_of(answer)["message"]


def test_a_wrong_engine_key_is_our_fault_not_the_clients(deployment: Deployment) -> None:
    deployment.up(key="other")
    answer = deployment.complete()
    assert answer.status_code == 502
    assert "refused the deployment's engine key" in error_of(answer)["message"]


def test_a_request_that_takes_too_long_is_a_504(deployment: Deployment) -> None:
    deployment.up(prefill={"hold": "prefill"}, request_timeout_seconds=0.2)
    answer = deployment.complete()
    assert answer.status_code == 504
    error_of(answer)
    deployment.prefills[0].script(hold="")
    deployment.idle()


def test_what_outlasts_the_drain_ends_with_an_error_event(deployment: Deployment) -> None:
    deployment.up(decode={"hold": "token"}, drain_seconds=0.2)
    with deployment.proxy.begun(COMPLETIONS, BODY | {"stream": True}) as lines:
        deployment.proxy.process.send_signal(signal.SIGTERM)
        rest = list(lines)
    assert last_event(rest)["error"]["code"] == 503
    assert deployment.proxy.process.wait() == 0
    deployment.idle()


def test_a_port_that_is_taken_ends_the_proxy(deployment: Deployment) -> None:
    deployment.up()
    with Deployment(deployment.folder) as other, pytest.raises(AssertionError, match="address already in use"):
        other.up(0, 0, port=deployment.proxy.port)


# --- with NIXL, and whoever leaves


COMPLETIONS = "/v1/completions"
BODY: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "max_tokens": 1000}
LEASE = 5.0
"""Half of it is what a machine has from prefill's answer to decode; a whole one is waited for."""


def test_leaving_during_prefill_ends_it_and_decode_never_hears_of_it(deployment: Deployment) -> None:
    deployment.up(nixl=True, prefill={"hold": "prefill"})
    for aborted, stream in enumerate((True, False), start=1):
        with deployment.proxy.open(COMPLETIONS, BODY | {"stream": stream}):
            deployment.prefills[0].wait(waiting=1)
        deployment.prefills[0].wait(waiting=0, aborted=aborted, held=0)
    assert deployment.decodes[0].state()["received"] == 0


def test_an_answer_on_its_way_is_read_and_dropped(deployment: Deployment) -> None:
    deployment.up(
        nixl=True, prefill={"hold": "answer"}, moments={"pdserve.pd.protocols.nixl.LAST_MOMENT_SECONDS": 60.0}
    )
    prefill, decode = deployment.fakes
    with deployment.proxy.open(COMPLETIONS, BODY):
        prefill.wait(held=1)
    deployment.proxy.until("cancelled 499")
    prefill.script(hold="")
    prefill.wait(held=0, delivered=1)
    decode.wait(finished=1, running=0)
    assert decode.body()["max_tokens"] == 1
    assert decode.body()["kv_transfer_params"]["do_remote_prefill"] is True


@pytest.mark.parametrize("stream", [True, False])
def test_leaving_before_decodes_scheduler_has_it_waits(deployment: Deployment, stream: bool) -> None:
    """vLLM's HTTP layer drops a request whose client leaves that early, and nobody tells prefill."""
    moments = {"pdserve.pd.protocols.nixl.TAKEN_IN_SECONDS": 4.0}
    deployment.up(nixl=True, decode={"hold": "arrival", "token_seconds": 0.05}, moments=moments)
    prefill, decode = deployment.fakes
    with deployment.proxy.open(COMPLETIONS, BODY | {"stream": stream}):
        decode.wait(waiting=0, received=1)
    deployment.proxy.until("cancelled 499")
    decode.script(hold="")
    prefill.wait(held=0, delivered=1)
    decode.wait(aborted=1, running=0, waiting=0)


SPLITS: dict[str, dict[str, Any]] = {"mooncake": {}, "nixl": {"nixl": True}}
EVERY_SPLIT = pytest.mark.parametrize("split", SPLITS.values(), ids=SPLITS.keys())


@EVERY_SPLIT
def test_leaving_before_the_first_token_or_while_streaming_aborts_decode(
    deployment: Deployment, split: dict[str, Any]
) -> None:
    deployment.up(**split, decode={"hold": "first"})
    prefill, decode = deployment.fakes
    for aborted, stream in enumerate((True, False), start=1):
        with deployment.proxy.open(COMPLETIONS, BODY | {"stream": stream}):
            decode.wait(running=1)
        decode.wait(aborted=aborted, running=0)
    decode.script(hold="token")
    with deployment.proxy.open(COMPLETIONS, BODY | {"stream": True}) as connection:
        assert connection.recv(65536).startswith(b"HTTP/1.1 200")
    decode.wait(aborted=3, running=0)
    prefill.wait(running=0, waiting=0, held=0)


def test_parameters_that_are_too_old_are_not_used(deployment: Deployment) -> None:
    """After the lease the blocks hold another prompt: the fake gives wrong KV then, as vLLM does, without an error."""
    deployment.up(nixl=True, prefill={"hold": "prefill", "lease": LEASE}, kv_lease_seconds=LEASE)
    prefill, decode = deployment.fakes
    with deployment.asking(PROMPT) as answer:
        prefill.wait(waiting=1)
        # As a machine that is suspended: the answer lies there until the lease is over.
        deployment.proxy.send_all(signal.SIGSTOP)
        prefill.script(hold="")
        prefill.wait(expired=1)
        deployment.proxy.send_all(signal.SIGCONT)
        assert answer.result().json()["choices"][0]["text"] == reference(prefill)
    # The one that this test has sent itself is the third.
    assert [fake.state()["received"] for fake in (prefill, decode)] == [3, 1]
    assert prefill.state()["late"] == 0


def test_a_prefill_that_fails_is_replaced_and_decode_never_hears_of_it(deployment: Deployment) -> None:
    deployment.up(2, 1, nixl=True)
    bad, good = deployment.prefills
    bad.script(prefill_status=500)
    answers = [deployment.complete(PROMPT) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [200, 200]
    assert deployment.decodes[0].state()["received"] == good.state()["delivered"] == 2


def test_what_prefill_refuses_is_not_tried_again(deployment: Deployment) -> None:
    """But for the second 404 in a row: the first may be its client's own."""
    deployment.up(2, 2, nixl=True)
    for received, status in enumerate((400, 422, 404), start=1):
        for prefill in deployment.prefills:
            prefill.script(prefill_status=status)
        answer = deployment.complete(PROMPT)
        assert (answer.status_code, error_of(answer)["message"]) == (status, "scripted failure")
        assert sum(fake.state()["received"] for fake in deployment.fakes) == received


def test_what_decode_refuses_is_not_tried_again(deployment: Deployment) -> None:
    """The refusal has told prefill: whoever used them again would pull blocks that are free."""
    deployment.up(1, 2, nixl=True, decode={"decode_status": 400})
    answer = deployment.complete(PROMPT)
    assert answer.status_code == 400
    deployment.prefills[0].wait(held=0, delivered=1)
    assert sum(fake.state()["received"] for fake in deployment.decodes) == 1
    assert deployment.prefills[0].state()["late"] == 0


def test_a_decode_that_fails_is_replaced_with_both_legs_anew(deployment: Deployment) -> None:
    deployment.up(1, 2, nixl=True)
    for decode in deployment.decodes:
        decode.script(kv_fails=1)
    deployment.decodes[1].script(kv_fails=0)
    answers = [deployment.complete(PROMPT, stream=stream) for stream in (True, True, False, False)]
    assert [answer.status_code for answer in answers] == [200] * 4
    names = [
        request["body"]["kv_transfer_params"]["remote_request_id"]
        for decode in deployment.decodes
        for request in decode.requests()
    ]
    # The two decodes take turns, so the one that fails was the first choice at least once.
    assert len(deployment.decodes[0].requests()) >= 1
    assert len(names) == len(set(names)) == deployment.prefills[0].state()["finished"]
    deployment.idle()
    assert deployment.prefills[0].state()["late"] == 0


def test_what_was_kept_for_a_decode_that_is_gone_is_dropped_by_another(deployment: Deployment) -> None:
    deployment.up(1, 2, nixl=True)
    deployment.decodes[0].end()
    answers = [deployment.complete(PROMPT) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [200, 200]
    # The two decodes take turns, so the one that is gone was the first choice once or twice.
    kept = deployment.prefills[0].state()["finished"]
    deployment.prefills[0].wait(held=0, delivered=kept)
    limits = [request["body"]["max_tokens"] for request in deployment.decodes[1].requests()]
    assert sorted(limits) == [*[1] * (kept - 2), 8, 8]
    assert kept > 2


@EVERY_SPLIT
def test_a_prefill_that_dies_while_it_computes_is_a_502(deployment: Deployment, split: dict[str, Any]) -> None:
    deployment.up(**split, prefill={"hold": "prefill"})
    with deployment.asking() as answer:
        deployment.prefills[0].wait(waiting=1)
        # Mooncake's decode waits for it, NIXL's has not heard of the request.
        asked = 0 if split else 1
        deployment.decodes[0].wait(received=asked, waiting=asked)
        deployment.prefills[0].end()
        assert answer.result().status_code == 502
    deployment.decodes[0].wait(aborted=asked, waiting=0)


def test_nothing_is_counted_as_load_once_all_have_left(deployment: Deployment) -> None:
    deployment.up(nixl=True, prefill={"hold": "prefill"})
    connections = [deployment.proxy.open(COMPLETIONS, BODY) for _ in range(20)]
    deployment.prefills[0].wait(waiting=20)
    for connection in connections:
        connection.close()
    deployment.prefills[0].wait(waiting=0, aborted=20)
    deployment.prefills[0].script(hold="")
    assert deployment.complete(PROMPT).status_code == 200
    deployment.idle()
    # The proxy listens on for a moment to the legs that it has left.
    while any(worker["in_flight"] or worker["prompt_tokens"] for worker in deployment.workers().values()):
        pass


# --- a client that leaves, at any moment, leaves no running request and no KV behind


PATIENT = {"pdserve.pd.protocols.mooncake.DELIVER_SECONDS": 60.0}
"""A proxy that lets prefill finish, and does not give up on it because this machine is slow."""


@pytest.mark.parametrize("stream", [True, False])
def test_leaving_mooncakes_prefill_lets_it_finish(deployment: Deployment, stream: bool) -> None:
    deployment.up(prefill={"hold": "prefill"}, decode={"hold": "first"}, moments=PATIENT)
    prefill, decode = deployment.fakes
    with deployment.proxy.open(COMPLETIONS, BODY | {"stream": stream}):
        prefill.wait(waiting=1)
        decode.wait(waiting=1)
    deployment.proxy.until("cancelled 499")
    assert prefill.state()["aborted"] == decode.state()["aborted"] == 0
    prefill.script(hold="")
    decode.wait(aborted=1, running=0, waiting=0)
    prefill.wait(finished=1, aborted=0, delivered=1)
    deployment.idle()


def test_one_that_leaves_the_queue_costs_those_behind_it_nothing(deployment: Deployment) -> None:
    """With coroutines compiled by mypyc the next one that waited got the exception of the one that had left."""
    deployment.up(prefill={"hold": "prefill"}, admission={"prefill": {"max_requests": 1}})

    def queued(count: int) -> None:
        deployment.proxy.shows(f'pdserve_proxy_queue_depth{{pool="prefill"}} {count}.0')

    body = BODY | {"max_tokens": 1}
    with deployment.proxy.open(COMPLETIONS, body) as first:
        deployment.prefills[0].wait(waiting=1)
        for _ in range(3):
            with deployment.proxy.open(COMPLETIONS, body):
                queued(1)
            deployment.proxy.until("cancelled 499")
            queued(0)
        with deployment.proxy.open(COMPLETIONS, body) as second, deployment.proxy.open(COMPLETIONS, body) as third:
            queued(2)
            deployment.prefills[0].script(hold="")
            for client in (first, second, third):
                assert client.recv(65536).startswith(b"HTTP/1.1 200")
    deployment.idle()


def test_clients_that_left_give_their_slots_back(deployment: Deployment) -> None:
    deployment.up(prefill={"hold": "prefill"}, transfer_slots=5)
    connections = [deployment.proxy.open(COMPLETIONS, BODY) for _ in range(20)]
    deployment.prefills[0].wait(waiting=4)
    for connection in connections:
        connection.close()
    for _ in connections:
        deployment.proxy.until("cancelled 499")
    deployment.prefills[0].script(hold="")
    assert deployment.complete().status_code == 200
    assert [fake.state()["received"] for fake in deployment.fakes] == [5, 5], "who waited for one reached no engine"
    deployment.idle()


def test_a_request_that_turns_out_to_be_malformed_gives_its_slot_back(deployment: Deployment) -> None:
    """What is inside vllm_xargs is only looked at when the legs' bodies are made."""
    deployment.up(transfer_slots=2)
    twice = '{"model":"tiny","prompt":"hi","vllm_xargs":{"a":1,"a":2}}'
    assert deployment.proxy.http.post(COMPLETIONS, content=twice).status_code == 400
    assert deployment.complete().status_code == 200


# --- what nobody expected ends one request, with an answer, and nothing stays of it


def test_an_unexpected_error_is_answered_and_logged(deployment: Deployment) -> None:
    room: dict[str, Any] = {"max_body_bytes": 2 * EASY_BYTES, "limits": {"max_buffered_bytes": 4 * EASY_BYTES}}
    deployment.up(**room, moments={"pdserve.pd.serve.large_bodies.Scan": 1.5})  # a number cannot be called
    for times in range(1, 6):
        answer = deployment.complete("x" * EASY_BYTES)
        assert (answer.status_code, error_of(answer)["message"]) == (500, "The proxy failed: TypeError")
        deployment.proxy.until("ERROR .*/v1/completions failed")
        deployment.proxy.until("TypeError: 'float' object is not callable")
        deployment.proxy.shows(f'requests_total{{path="/v1/completions",status="500"}} {times}.0')
    assert deployment.complete().status_code == 200
