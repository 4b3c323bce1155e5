"""A client that leaves, at any moment, leaves no running request and no KV behind.

A prefill leg whose decode leg was sent is not aborted: decode would wait for KV that can no longer come.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.proxy.deployment import MODEL, Deployment

COMPLETIONS = "/v1/completions"
PATIENT = {"pdserve.pd.protocols.mooncake.DELIVER_SECONDS": 60.0}
"""A proxy that lets prefill finish, and does not give up on it because this machine is slow."""
BODY: dict[str, Any] = {"model": MODEL, "prompt": "hello world", "max_tokens": 1000}


@pytest.mark.parametrize("stream", [True, False])
def test_leaving_during_prefill_lets_prefill_finish_and_then_aborts_decode(
    deployment: Deployment, stream: bool
) -> None:
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


def test_leaving_while_waiting_for_a_slot_reaches_no_engine(deployment: Deployment) -> None:
    deployment.up(prefill={"hold": "prefill"}, transfer_slots=2)
    with deployment.proxy.open(COMPLETIONS, BODY | {"max_tokens": 1}):
        deployment.prefills[0].wait(waiting=1)
        with deployment.proxy.open(COMPLETIONS, BODY):
            pass
        deployment.proxy.until("cancelled 499")
        deployment.prefills[0].script(hold="")
        deployment.decodes[0].wait(finished=1)
    assert [fake.state()["received"] for fake in deployment.fakes] == [1, 1]


def test_one_that_leaves_the_queue_costs_those_behind_it_nothing(deployment: Deployment) -> None:
    """With coroutines compiled by mypyc the next one that waited got the exception of the one that had left."""
    deployment.up(prefill={"hold": "prefill"}, admission={"prefill": {"max_requests": 1}})

    def queued(count: int) -> None:
        wanted = f'pdserve_proxy_queue_depth{{pool="prefill"}} {count}.0'
        while wanted not in deployment.proxy.http.get("/metrics").text:
            pass

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
    deployment.idle()


def test_leaving_and_then_a_dead_prefill_ends_decode_too(deployment: Deployment) -> None:
    deployment.up(prefill={"hold": "prefill"})
    prefill, decode = deployment.fakes
    with deployment.proxy.open(COMPLETIONS, BODY):
        prefill.wait(waiting=1)
        decode.wait(waiting=1)
    deployment.proxy.until("cancelled 499")
    prefill.end()
    decode.wait(aborted=1, waiting=0)
    assert decode.state()["running"] == 0


def test_a_request_that_turns_out_to_be_malformed_gives_its_slot_back(deployment: Deployment) -> None:
    """What is inside vllm_xargs is only looked at when the legs' bodies are made."""
    deployment.up(transfer_slots=2)
    twice = '{"model":"tiny","prompt":"hi","vllm_xargs":{"a":1,"a":2}}'
    assert deployment.proxy.http.post(COMPLETIONS, content=twice).status_code == 400
    assert deployment.complete().status_code == 200
