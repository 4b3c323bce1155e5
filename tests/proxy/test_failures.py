"""Each failure of an engine becomes a clear answer at once: a status before the first byte, an SSE event after it."""

from __future__ import annotations

import json
import signal
import socket
from typing import Any

import httpx
import pytest

from tests.proxy.deployment import MODEL, Deployment

STREAM: dict[str, Any] = {"model": MODEL, "prompt": "hello world", "max_tokens": 1000, "stream": True}


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
    with deployment.proxy.begun("/v1/completions", STREAM) as lines:
        deployment.proxy.process.send_signal(signal.SIGTERM)
        rest = list(lines)
    assert last_event(rest)["error"]["code"] == 503
    assert deployment.proxy.process.wait() == 0
    deployment.idle()


def test_a_port_that_is_taken_ends_the_proxy(deployment: Deployment) -> None:
    deployment.up()
    with Deployment(deployment.folder) as other, pytest.raises(AssertionError, match="address already in use"):
        other.up(0, 0, port=deployment.proxy.port)
