"""A request that finds no engine of a role waits for one, and is answered when that is there."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.proxy.deployment import MODEL, Deployment, Fake
from tests.proxy.raw import Script, head, post, raw_deployment, sends

pytestmark = pytest.mark.process

HOLDS: dict[str, Any] = {"control": True, "on_empty_pool": "wait"}
BODY: dict[str, Any] = {"model": MODEL, "prompt": "hello world", "max_tokens": 8}


def whole_error(status: int) -> bytes:
    return head(length=2, status=f"{status} Error") + b"{}"


def figure(deployment: Deployment, name: str, role: str = "decode") -> float:
    page = deployment.proxy.http.get("/metrics").text
    (value,) = re.findall(rf'^pdserve_proxy_{name}{{[^}}]*role="{role}"[^}}]*}} (\S+)$', page, re.M) or ["0"]
    return float(value)


def held(deployment: Deployment, count: int, role: str = "decode") -> None:
    """Wait until so many requests wait for an engine of the role."""
    while figure(deployment, "held_requests", role) != count:
        pass


@contextmanager
def asked(deployment: Deployment, count: int = 1) -> Iterator[list[Future[httpx.Response]]]:
    """So many requests, one after the other, which wait for a decode."""
    with ThreadPoolExecutor(count) as pool:
        answers = []
        for number in range(count):
            answers.append(pool.submit(deployment.complete, f"request {number}"))
            held(deployment, number + 1)
        yield answers


def another_life(deployment: Deployment, of: Fake) -> Fake:
    """The engine is started again on its port."""
    of.end()
    new = deployment.engine(of.name, of.role, port=of.port, bootstrap=of.bootstrap)
    fakes = deployment.prefills if of.role == "prefill" else deployment.decodes
    fakes[fakes.index(of)] = new
    return new


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_requests_wait_for_a_role_that_nobody_has(deployment: Deployment, role: str) -> None:
    deployment.up(**HOLDS)
    for before, state in enumerate(("starting", "draining", "dead")):
        deployment.proxy.push(f"{role}-0", state)
        with deployment.asking() as answer:
            held(deployment, 1, role)
            assert deployment.proxy.http.get("/ready").json()["held"][role]["requests"] == 1
            assert [fake.state()["received"] for fake in deployment.fakes] == [before, before]
            deployment.proxy.push(f"{role}-0", "ready")
            assert answer.result().status_code == 200
        assert figure(deployment, "held_requests", role) == figure(deployment, "held_oldest_seconds", role) == 0
        assert figure(deployment, "held_requests_ended_total", role) == before + 1


def test_they_are_answered_in_the_order_in_which_they_came(deployment: Deployment) -> None:
    deployment.up(**HOLDS)
    deployment.proxy.push("decode-0", "dead")
    with asked(deployment, 8) as answers:
        deployment.proxy.push("decode-0", "ready")
        assert {answer.result().status_code for answer in answers} == {200}
    assert [request["body"]["prompt"] for request in deployment.prefills[0].requests()] == [
        f"request {number}" for number in range(8)
    ]


def test_a_client_that_leaves_is_forgotten_at_once(deployment: Deployment) -> None:
    deployment.up(**HOLDS)
    deployment.proxy.push("decode-0", "dead")
    with deployment.proxy.open("/v1/completions", BODY):
        held(deployment, 1)
    held(deployment, 0)
    deployment.proxy.push("decode-0", "ready")
    assert deployment.complete().status_code == 200
    assert [fake.state()["received"] for fake in deployment.fakes] == [1, 1]


def test_what_waits_is_bounded_by_the_budget_of_bytes(deployment: Deployment) -> None:
    deployment.up(**HOLDS, limits={"max_buffered_bytes": 400_000})
    deployment.proxy.push("decode-0", "dead")
    with deployment.asking(user="x" * 150_000) as answer:
        held(deployment, 1)
        assert deployment.complete(user="x" * 250_000).status_code == 503
        assert figure(deployment, "held_requests") == 1
        deployment.proxy.push("decode-0", "ready")
        assert answer.result().status_code == 200


def test_after_hold_seconds_it_gets_503_with_retry_after(deployment: Deployment) -> None:
    deployment.up(**HOLDS, hold_seconds=0.2)
    deployment.proxy.push("decode-0", "dead")
    answer = deployment.complete()
    assert (answer.status_code, answer.json()["error"]["message"]) == (503, "No decode worker is ready (1 dead).")
    assert int(answer.headers["retry-after"]) > 0


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("knows", ["the launcher first", "the connection first"])
def test_a_request_whose_only_engine_died_is_answered_by_its_next_life(
    deployment: Deployment, role: str, knows: str
) -> None:
    patient = {"pdserve.pd.relay.hold.DEATH_SECONDS": 600.0}
    computes, writes = ({"hold": "prefill"}, {}) if role == "prefill" else ({}, {"hold": "first"})
    deployment.up(**HOLDS, moments=patient, prefill={**computes}, decode={**writes})
    (engine,) = deployment.prefills if role == "prefill" else deployment.decodes
    with deployment.asking() as answer:
        engine.wait(**({"waiting": 1} if role == "prefill" else {"running": 1}))
        if knows == "the launcher first":
            deployment.proxy.push(engine.name, "dead")
            new = another_life(deployment, engine)
        else:
            new = another_life(deployment, engine)
            deployment.proxy.push(engine.name, "dead")
        held(deployment, 1, role)
        deployment.proxy.push(engine.name, "starting")
        deployment.proxy.push(engine.name, "ready")
        assert answer.result().status_code == 200
    assert new.state()["finished"] == 1
    deployment.idle()


@pytest.mark.parametrize(
    ("answer", "status"), [(sends(cut=True), 502), (sends(whole_error(500)), 500)], ids=["no answer", "an error"]
)
def test_an_engine_that_fails_and_lives_is_not_waited_for(tmp_path: Path, answer: Script, status: int) -> None:
    """Its next life would never come."""
    with raw_deployment(tmp_path, on_empty_pool="wait", hold_seconds=600) as raw:
        raw.engine.script = answer
        assert raw.ask(post("/v1/completions", BODY)).status == status


def test_queued_requests_wait_on_when_the_last_engine_dies(deployment: Deployment) -> None:
    limits = {"decode": {"max_requests": 1}}
    deployment.up(**HOLDS, admission=limits, decode={"hold": "first"})
    with ThreadPoolExecutor() as pool:
        running = pool.submit(deployment.complete)
        deployment.decodes[0].wait(running=1)
        queued = pool.submit(deployment.complete)
        deployment.proxy.shows('queue_depth{pool="decode"} 1')
        deployment.proxy.push("decode-0", "dead")
        held(deployment, 2)
        deployment.decodes[0].script(hold="")
        deployment.proxy.push("decode-0", "starting")
        deployment.proxy.push("decode-0", "ready")
        assert [running.result().status_code, queued.result().status_code] == [200, 200]


def test_who_waits_for_an_open_breaker_is_answered_once_a_canary_is(deployment: Deployment) -> None:
    """No event tells that it has closed."""
    deployment.up(**HOLDS, breaker={"failures": 1, "open_seconds": 0.5}, health={"failures": 1000})
    old = deployment.decodes[0]
    old.end()
    deployment.complete()  # it cannot be reached
    new = another_life(deployment, old)
    with ThreadPoolExecutor(4) as pool:
        assert {answer.status_code for answer in pool.map(lambda _: deployment.complete(), range(4))} == {200}
    assert new.state()["finished"] == 4 + 1


def test_a_proxy_that_ends_turns_away_who_waits(deployment: Deployment) -> None:
    deployment.up(**HOLDS, hold_seconds=600, drain_seconds=600, processes=2)
    deployment.proxy.push("decode-0", "dead")
    with asked(deployment, 4) as answers:
        deployment.proxy.process.send_signal(signal.SIGTERM)
        assert {answer.result().status_code for answer in answers} == {503}
    assert deployment.proxy.process.wait() == 0


def test_who_waits_in_a_retiring_process_is_answered_by_it(deployment: Deployment) -> None:
    deployment.up(**HOLDS, hold_seconds=600, drain_seconds=600)
    deployment.proxy.push("decode-0", "dead")
    with asked(deployment) as answers:
        deployment.proxy.push_line(json.dumps({"restart": True}))
        deployment.proxy.until("draining")
        deployment.proxy.push_line(json.dumps({"worker": "decode-0", "state": "ready"}))
        assert answers[0].result().status_code == 200
        deployment.proxy.until("the old proxy process 0 has ended")


def test_processes_hold_each_their_own_and_count_together(deployment: Deployment) -> None:
    deployment.up(**HOLDS, processes=3)
    deployment.proxy.push("decode-0", "dead")
    for _ in range(2):  # `push` has waited for the first to say so
        deployment.proxy.until("decode-0 is dead")
    connections = [deployment.proxy.open("/v1/completions", BODY) for _ in range(9)]
    held(deployment, 9)
    assert figure(deployment, "held_oldest_seconds") > 0
    deployment.proxy.push("decode-0", "ready")
    for connection in connections:
        with connection:
            assert connection.recv(100).startswith(b"HTTP/1.1 200")
