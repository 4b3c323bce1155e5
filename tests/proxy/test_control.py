"""Worker states come from the launcher; the proxy believes it at once."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.proxy.deployment import MODEL, Deployment

STREAM: dict[str, Any] = {"model": MODEL, "prompt": "hello world", "max_tokens": 1000, "stream": True}


def test_workers_begin_as_starting_and_nothing_is_served(deployment: Deployment) -> None:
    deployment.up(control=True)
    for fake in deployment.fakes:
        deployment.proxy.push(fake.name, "starting")
    ready = deployment.proxy.http.get("/ready")
    assert ready.status_code == 503
    assert ready.json()["empty_pools"] == ["prefill", "decode"]
    assert {worker["state"] for worker in ready.json()["workers"]} == {"starting"}
    assert deployment.proxy.http.get("/health").status_code == 200


def test_ready_needs_one_worker_of_each_role(deployment: Deployment) -> None:
    deployment.up(control=True)
    assert deployment.proxy.http.get("/ready").status_code == 200
    deployment.proxy.push("decode-0", "dead")
    answer = deployment.proxy.http.get("/ready")
    assert (answer.status_code, answer.json()["empty_pools"]) == (503, ["decode"])


def test_an_empty_pool_is_a_503_with_retry_after(deployment: Deployment) -> None:
    deployment.up(control=True)
    for state in ("starting", "draining", "dead"):
        deployment.proxy.push("prefill-0", state)
        answer = deployment.complete()
        assert (answer.status_code, int(answer.headers["retry-after"]) > 0) == (503, True)
        assert f"(1 {state})" in answer.json()["error"]["message"]
    assert deployment.decodes[0].state()["received"] == 0


def test_a_dead_worker_gets_no_further_request(deployment: Deployment) -> None:
    deployment.up(2, 2, control=True)
    deployment.proxy.push("prefill-0", "dead")
    deployment.proxy.push("decode-1", "dead")
    for _ in range(4):
        assert deployment.complete().status_code == 200
    assert [fake.state()["received"] for fake in deployment.fakes] == [0, 4, 4, 0]


def test_a_pushed_death_ends_waiting_requests_at_once(deployment: Deployment) -> None:
    """The engines here live and hang: only the push can end the wait."""
    deployment.up(control=True, prefill={"hold": "prefill"})
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(deployment.complete)
        deployment.prefills[0].wait(waiting=1)
        deployment.decodes[0].wait(waiting=1)
        deployment.proxy.push("prefill-0", "dead")
        assert answer.result().status_code == 502
    assert answer.result().json()["error"]["message"] == "prefill-0 died"
    deployment.decodes[0].wait(aborted=1, waiting=0)


def test_a_pushed_death_moves_waiting_requests_to_another_worker(deployment: Deployment) -> None:
    deployment.up(2, 1, control=True, prefill={"hold": "prefill"})
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(deployment.complete)
        deployment.decodes[0].wait(waiting=1)
        busy = deployment.asked(*deployment.prefills)
        (other,) = (fake for fake in deployment.prefills if fake is not busy)
        other.script(hold="")
        deployment.proxy.push(busy.name, "dead")
        assert answer.result().status_code == 200
    assert other.state()["finished"] == 1


def test_a_pushed_death_of_decode_ends_its_streams_with_an_error_event(deployment: Deployment) -> None:
    deployment.up(control=True, decode={"hold": "token"})
    with deployment.proxy.http.stream("POST", "/v1/completions", json=STREAM) as answer:
        lines = answer.iter_lines()
        next(lines)
        deployment.proxy.push("decode-0", "dead")
        events = [line for line in lines if line]
    assert json.loads(events[-1].removeprefix("data: "))["error"]["message"] == "decode-0 died"


def test_a_draining_worker_finishes_what_it_has(deployment: Deployment) -> None:
    deployment.up(1, 2, control=True, decode={"hold": "first"})
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(deployment.complete)
        deployment.prefills[0].wait(finished=1)
        busy = deployment.asked(*deployment.decodes)
        (other,) = (fake for fake in deployment.decodes if fake is not busy)
        deployment.proxy.push(busy.name, "draining")
        for fake in (busy, other):
            fake.script(hold="")
        assert answer.result().status_code == 200
    assert deployment.complete().status_code == 200
    assert (busy.state()["received"], other.state()["received"]) == (1, 1)


def test_a_prefill_that_comes_back_is_asked_for_its_new_engine_id(deployment: Deployment) -> None:
    deployment.up(control=True)
    assert deployment.complete().status_code == 200
    old = deployment.prefills[0]
    deployment.proxy.push(old.name, "dead")
    old.end()
    deployment.prefills[0] = deployment.engine(old.name, "prefill", port=old.port, bootstrap=old.bootstrap)
    deployment.proxy.push(old.name, "starting")
    deployment.proxy.push(old.name, "ready")
    assert deployment.complete().status_code == 200
    assert deployment.decodes[0].state()["received"] == 2, "no attempt went out with the old engine id"


def test_a_line_that_makes_no_sense_is_skipped(deployment: Deployment) -> None:
    deployment.up(control=True)
    for line in ("", "no json", "[1]", '{"worker": "x", "state": "ready"}', '{"worker": ["a"], "state": 1}'):
        deployment.proxy.push_line(line)
    deployment.proxy.push("decode-0", "ready")
    assert deployment.complete().status_code == 200


def test_the_end_of_the_channel_changes_nothing(deployment: Deployment) -> None:
    deployment.up(control=True)
    assert deployment.proxy.process.stdin is not None
    deployment.proxy.process.stdin.close()
    assert deployment.complete().status_code == 200


def test_workers_shows_state_and_legs_in_flight(deployment: Deployment) -> None:
    deployment.up(control=True, decode={"hold": "first"})
    with deployment.proxy.open("/v1/completions", STREAM):
        deployment.decodes[0].wait(running=1)
        workers = {worker["name"]: worker for worker in deployment.proxy.http.get("/workers").json()["workers"]}
    assert workers["decode-0"] == {
        "name": "decode-0",
        "role": "decode",
        "state": "ready",
        "healthy": True,
        "breaker": "closed",
        "in_flight": 1,
        "prompt_tokens": 0,
        "kv_usage": 0.0,
        "served": 1,
    }
    deployment.idle()
