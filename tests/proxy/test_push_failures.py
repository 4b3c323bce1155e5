"""With both legs of a push at once, a failure or a client that leaves ends both, and leaves nothing behind."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.proxy.deployment import MODEL, Deployment
from tests.proxy.test_contract import PROMPT, reference

COMPLETIONS = "/v1/completions"
BODY: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "max_tokens": 1000}


def warmed(deployment: Deployment) -> None:
    """The proxy knows where its prefills are, and their faults can be about requests of clients alone."""
    for _ in deployment.prefills:
        assert deployment.complete("warm").status_code == 200
    for fake in deployment.fakes:
        fake.wait(running=0, waiting=0)


@pytest.mark.parametrize("stream", [True, False])
def test_leaving_during_prefill_ends_both_legs(deployment: Deployment, stream: bool) -> None:
    moments = {"pdserve.pd.protocols.nixl_push.TAKEN_IN_SECONDS": 0.2}
    deployment.up(push=True, moments=moments)
    warmed(deployment)
    prefill, decode = deployment.fakes
    prefill.script(hold="prefill")
    with deployment.proxy.open(COMPLETIONS, BODY | {"stream": stream}):
        prefill.wait(waiting=1)
        decode.wait(waiting=1)
    prefill.wait(waiting=0, aborted=1)
    # Aborted, or failed by prefill's word that it writes nothing, whichever was first.
    decode.wait(waiting=0, running=0)


def test_leaving_before_decodes_scheduler_has_the_request_waits_until_it_has(deployment: Deployment) -> None:
    """vLLM's HTTP layer drops a request whose client leaves that early, and nobody would withdraw it."""
    moments = {"pdserve.pd.protocols.nixl_push.TAKEN_IN_SECONDS": 60.0}
    deployment.up(push=True, moments=moments)
    warmed(deployment)
    prefill, decode = deployment.fakes
    decode.script(hold="arrival", token_seconds=0.05)
    with deployment.proxy.open(COMPLETIONS, BODY | {"stream": True}):
        prefill.wait(held=2)
    deployment.proxy.until("cancelled 499")
    decode.script(hold="")
    prefill.wait(held=1)
    decode.wait(aborted=1, running=0, waiting=0)


@pytest.mark.parametrize("stream", [True, False])
def test_a_decode_that_fails_is_replaced_with_both_legs_anew(deployment: Deployment, stream: bool) -> None:
    """Under another request id: what the first attempt has left cannot meet the second."""
    deployment.up(1, 2, push=True)
    warmed(deployment)
    deployment.decodes[0].script(kv_fails=1)
    answers = [deployment.complete(PROMPT, stream=stream) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [200, 200]
    names = [request["headers"]["x-request-id"] for decode in deployment.decodes for request in decode.requests()]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("which", ["prefill", "decode"])
def test_what_one_leg_refuses_is_refused_once_and_ends_the_other(deployment: Deployment, which: str) -> None:
    deployment.up(push=True)
    warmed(deployment)
    prefill, decode = deployment.fakes
    (prefill if which == "prefill" else decode).script(**{f"{which}_status": 400})
    assert deployment.complete(PROMPT).status_code == 400
    prefill.wait(waiting=0, running=0)
    decode.wait(waiting=0, running=0)


def test_a_prefill_that_dies_before_the_request_is_replaced(deployment: Deployment) -> None:
    deployment.up(2, 1, push=True)
    warmed(deployment)
    deployment.prefills[0].end()
    answers = [deployment.complete(PROMPT) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [200, 200]
    assert answers[0].json()["choices"][0]["text"] == reference(deployment.prefills[1])


def test_a_prefill_that_dies_while_it_computes_is_replaced_and_its_decode_leg_is_left(deployment: Deployment) -> None:
    deployment.up(2, 1, push=True)
    warmed(deployment)
    for prefill in deployment.prefills:
        prefill.script(hold="prefill")
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(deployment.complete, PROMPT)
        while not (busy := [fake for fake in deployment.prefills if fake.state()["waiting"]]):
            pass
        deployment.decodes[0].wait(waiting=1)
        busy[0].end()
        (other,) = (fake for fake in deployment.prefills if fake is not busy[0])
        other.script(hold="")
        assert answer.result().status_code == 200
    deployment.decodes[0].wait(waiting=0, running=0, aborted=1)


def test_a_prefill_that_dies_after_it_has_written_is_no_harm(deployment: Deployment) -> None:
    deployment.up(push=True)
    warmed(deployment)
    deployment.decodes[0].script(hold="token")
    with deployment.proxy.http.stream("POST", COMPLETIONS, json=BODY | {"stream": True, "max_tokens": 3}) as answer:
        lines = answer.iter_lines()
        next(lines)
        deployment.prefills[0].end()
        deployment.decodes[0].script(hold="")
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
