"""What the launcher tells a proxy that serves: states, workers that come and go, canaries."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping
from typing import Any

import httpx
import pytest

from tests.proxy.deployment import KEY, MODEL, Deployment, Fake

STREAM: dict[str, Any] = {"model": MODEL, "prompt": "hello world", "max_tokens": 1000, "stream": True}


def test_a_pushed_death_ends_waiting_requests_at_once(deployment: Deployment) -> None:
    """The engines here live and hang: only the push can end the wait."""
    deployment.up(control=True, prefill={"hold": "prefill"})
    with deployment.asking() as answer:
        deployment.prefills[0].wait(waiting=1)
        deployment.decodes[0].wait(waiting=1)
        deployment.proxy.push("prefill-0", "dead")
        assert answer.result().status_code == 502
    assert answer.result().json()["error"]["message"] == "prefill-0 died"
    deployment.decodes[0].wait(aborted=1, waiting=0)


def test_a_pushed_death_moves_waiting_requests_to_another_worker(deployment: Deployment) -> None:
    deployment.up(2, 1, control=True, prefill={"hold": "prefill"})
    with deployment.asking() as answer:
        deployment.decodes[0].wait(waiting=1)
        busy, other = deployment.asked(*deployment.prefills)
        other.script(hold="")
        deployment.proxy.push(busy.name, "dead")
        assert answer.result().status_code == 200
    assert other.state()["finished"] == 1


def test_a_pushed_death_of_decode_ends_its_streams_with_an_error_event(deployment: Deployment) -> None:
    deployment.up(control=True, decode={"hold": "token"})
    with deployment.proxy.begun("/v1/completions", STREAM) as lines:
        deployment.proxy.push("decode-0", "dead")
        events = [*lines]
    assert json.loads(events[-1].removeprefix("data: "))["error"]["message"] == "decode-0 died"


def test_a_draining_worker_finishes_what_it_has(deployment: Deployment) -> None:
    deployment.up(1, 2, control=True, decode={"hold": "first"})
    with deployment.asking() as answer:
        deployment.prefills[0].wait(finished=1)
        busy, other = deployment.asked(*deployment.decodes)
        deployment.proxy.push(busy.name, "draining")
        for fake in (busy, other):
            fake.script(hold="")
        assert answer.result().status_code == 200
    assert deployment.complete().status_code == 200
    assert (busy.state()["received"], other.state()["received"]) == (1, 1)


def test_a_line_that_makes_no_sense_is_skipped(deployment: Deployment) -> None:
    deployment.up(control=True)
    for line in ("", "no json", "[1]", '{"worker": "x", "state": "ready"}', '{"worker": ["a"], "state": 1}'):
        deployment.proxy.push_line(line)
    deployment.proxy.push("decode-0", "ready")
    assert deployment.complete().status_code == 200
    # Nor does the end of the channel change anything.
    assert deployment.proxy.process.stdin is not None
    deployment.proxy.process.stdin.close()
    assert deployment.complete().status_code == 200


def test_workers_shows_state_and_legs_in_flight(deployment: Deployment) -> None:
    deployment.up(control=True, decode={"hold": "first"})
    with deployment.proxy.open("/v1/completions", STREAM):
        deployment.decodes[0].wait(running=1)
        workers = deployment.workers()
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


# --- the launcher names the workers of a proxy that serves: they come and go, and no request is lost by it


BODY: dict[str, Any] = {"model": MODEL, "prompt": "hello world", "max_tokens": 8}
SHORT_STREAM = BODY | {"stream": True, "max_tokens": 20}
PROCESSES = 3


def tell(deployment: Deployment, *fakes: Fake, **states: str) -> None:
    """All workers that there are; those are ready of which `states` has nothing. Returns when one process knows."""
    known = {fake.name: states.get(fake.name.replace("-", "_"), "ready") for fake in fakes}
    message = {"workers": [fake.config().model_dump() for fake in fakes], "states": known}
    deployment.proxy.push_line(json.dumps(message))
    deployment.proxy.until("control: the workers are")


def until(deployment: Deployment, name: str, **fields: object) -> None:
    """Wait until a worker is as described; without a description, until it is gone."""
    while (seen := deployment.workers().get(name)) is None or any(seen[key] != fields[key] for key in fields):
        if not fields and seen is None:
            return


def more(statuses: Mapping[int, int], count: int = 12) -> None:
    """Wait until so many further requests were answered."""
    wanted = sum(statuses.values()) + count
    while sum(statuses.values()) < wanted:
        pass


def test_one_that_comes_is_starting_and_used_once_it_is_ready(deployment: Deployment) -> None:
    deployment.up(control=True)
    new = deployment.engine("decode-1", "decode")
    tell(deployment, *deployment.fakes, new, decode_1="starting")
    assert deployment.workers()["decode-1"]["state"] == "starting"
    assert {deployment.complete().status_code for _ in range(4)} == {200}
    assert new.state()["received"] == 0
    deployment.proxy.push("decode-1", "ready")
    assert {deployment.complete().status_code for _ in range(4)} == {200}
    assert new.state()["received"] > 0


def test_one_that_goes_finishes_what_it_has_and_is_then_gone(deployment: Deployment) -> None:
    deployment.up(1, 2, control=True, decode={"hold": "first"})
    with deployment.asking() as answer:
        busy, other = deployment.asked(*deployment.decodes)
        tell(deployment, *deployment.prefills, other)
        other.script(hold="")
        assert deployment.complete().status_code == 200
        leaving = deployment.workers()[busy.name]
        assert (leaving["state"], leaving["in_flight"]) == ("draining", 1)
        busy.script(hold="")
        assert answer.result().status_code == 200
    until(deployment, busy.name)
    assert deployment.complete().status_code == 200
    assert (busy.state()["received"], other.state()["received"]) == (1, 2)


def test_a_worker_at_another_address_replaces_the_old_one(deployment: Deployment) -> None:
    deployment.up(control=True, decode={"hold": "token"})
    (old,) = deployment.decodes
    new = deployment.engine("decode-0", "decode")
    with deployment.proxy.begun("/v1/completions", SHORT_STREAM) as lines:
        tell(deployment, *deployment.prefills, new)
        assert deployment.complete().status_code == 200
        old.script(hold="")
        assert [*lines][-1] == "data: [DONE]"
    assert (old.state()["received"], new.state()["received"]) == (1, 1)
    assert deployment.workers()["decode-0"]["in_flight"] == 0


def test_the_same_again_changes_nothing(deployment: Deployment) -> None:
    deployment.up(control=True)
    assert deployment.complete().status_code == 200
    served = deployment.workers()
    tell(deployment, *deployment.fakes)
    assert deployment.workers() == served
    deployment.proxy.push_line(json.dumps({"add": deployment.decodes[0].config().model_dump()}))
    deployment.proxy.push("decode-0", "ready")
    assert deployment.workers() == served


def test_a_set_with_one_that_cannot_be_used_changes_nothing(deployment: Deployment) -> None:
    """It has no such role, not what its protocol needs, no address, or a field of another version."""
    deployment.up(control=True)
    known = [fake.config().model_dump() for fake in deployment.fakes]
    wrongs: list[dict[str, object]] = [
        {"role": "aggregated"},
        {"role": "prefill", "bootstrap_url": None},
        {"url": 1},
        {"unknown": 1},
    ]
    for wrong in wrongs:
        new = known[1] | {"name": "decode-1"} | wrong
        deployment.proxy.push_line(json.dumps({"workers": [*known, new], "states": {"decode-0": "dead"}}))
        deployment.proxy.until("control: cannot use")
        assert deployment.complete().status_code == 200
        assert sorted(deployment.workers()) == ["decode-0", "prefill-0"]


def test_workers_come_and_go_under_load(deployment: Deployment) -> None:
    deployment.up(2, 2, control=True, processes=PROCESSES, on_empty_pool="wait")
    prefill, decode = deployment.engine("prefill-2", "prefill"), deployment.engine("decode-2", "decode")
    first, second = deployment.prefills, deployment.decodes
    with deployment.clients(BODY) as statuses:
        more(statuses)
        tell(deployment, *deployment.fakes, prefill, decode, prefill_2="starting", decode_2="starting")
        more(statuses)
        for name in ("prefill-2", "decode-2"):
            deployment.proxy.push(name, "ready")
        tell(deployment, first[0], prefill, second[0], decode)
        for gone in ("prefill-1", "decode-1"):
            until(deployment, gone)
        for gone_engine in (first[1], second[1]):
            gone_engine.wait(running=0, waiting=0)
            gone_engine.end()
        more(statuses)
        deployment.proxy.push_line(json.dumps({"restart": True}))
        deployment.proxy.until_each(*(f"the old proxy process {number} has ended" for number in range(PROCESSES)))
        assert sorted(deployment.workers()) == ["decode-0", "decode-2", "prefill-0", "prefill-2"]
        more(statuses)
        tell(deployment, prefill, decode)
        more(statuses)
    assert set(statuses) == {200}
    victim = min(deployment.proxy.members)
    os.kill(victim, signal.SIGKILL)
    deployment.proxy.until("started anew")
    deployment.proxy.until("serving on")
    # Each of the processes has let go of those that have gone within half a second.
    while any(sorted(deployment.workers()) != ["decode-2", "prefill-2"] for _ in range(4 * PROCESSES)):
        pass
    assert deployment.complete().status_code == 200
    assert prefill.state()["received"] > 0
    assert decode.state()["received"] > 0


@pytest.mark.parametrize("protocol", ["nixl", "mooncake"])
def test_a_request_counts_at_prefill_until_decode_has_its_kv(deployment: Deployment, protocol: str) -> None:
    """A prefill that is drained may be stopped once nothing counts there."""
    deployment.up(control=True, nixl=protocol == "nixl", decode={"hold": "arrival"})
    prefill, decode = deployment.prefills[0], deployment.decodes[0]
    with deployment.proxy.open("/v1/completions", SHORT_STREAM) as client:
        prefill.wait(finished=1)
        assert deployment.workers()["prefill-0"]["in_flight"] == 1
        decode.script(hold="token")
        until(deployment, "prefill-0", in_flight=0)
        assert deployment.workers()["decode-0"]["in_flight"] == 1
        assert client.recv(100).startswith(b"HTTP/1.1 200")


def test_what_processes_that_are_replaced_still_do_is_told(deployment: Deployment) -> None:
    """Their successors do not know on which workers."""
    deployment.up(control=True, decode={"hold": "token"})

    def retiring() -> int:
        return int(deployment.proxy.http.get("/workers").json()["retiring"])

    assert retiring() == 0
    with deployment.proxy.begun("/v1/completions", SHORT_STREAM) as lines:
        deployment.proxy.push_line(json.dumps({"restart": True}))
        deployment.proxy.until("draining")
        while retiring() != 1:
            pass
        deployment.decodes[0].script(hold="")
        assert [*lines][-1] == "data: [DONE]"
    deployment.proxy.until("the old proxy process 0 has ended")
    while retiring():
        pass


# --- a canary through a named pair, for who has the deployment's engine key


OWNER = {"authorization": f"Bearer {KEY}"}


def canary(deployment: Deployment, asked: Mapping[str, Any] = {}, headers: Mapping[str, str] = OWNER) -> httpx.Response:
    pair = {"prefill": "prefill-0", "decode": "decode-0", "tokens": 40, "seconds": 60, **asked}
    return deployment.proxy.http.post("/canary", params=pair, headers=headers)


@pytest.mark.parametrize("protocol", ["mooncake", "nixl"])
def test_it_goes_to_its_pair_whatever_their_state_is(deployment: Deployment, protocol: str) -> None:
    deployment.up(2, 2, control=True, nixl=protocol == "nixl")
    deployment.proxy.push("prefill-1", "starting")
    deployment.proxy.push("decode-1", "draining")
    assert canary(deployment, {"prefill": "prefill-1", "decode": "decode-1"}).status_code == 200
    assert [decode.transferred() for decode in deployment.decodes] == [0, 40]
    assert [prefill.state()["delivered"] for prefill in deployment.prefills] == [0, 1]
    page = deployment.proxy.http.get("/metrics").text
    assert not [line for line in page.splitlines() if line.startswith("pdserve_proxy_requests_total") and "/v1" in line]


@pytest.mark.parametrize("before", ["draining", "dead"])
def test_a_prefill_that_starts_anew_is_asked_for_its_new_engine_id(deployment: Deployment, before: str) -> None:
    """Where its restart was asked for nobody has called it dead."""
    deployment.up(control=True)
    assert canary(deployment).status_code == 200
    old = deployment.prefills[0]
    deployment.proxy.push("prefill-0", before)
    old.end()
    deployment.proxy.push("prefill-0", "starting")
    deployment.engine("prefill-0", "prefill", port=old.port, bootstrap=old.bootstrap)
    assert canary(deployment).status_code == 200
    assert deployment.decodes[0].state()["received"] == 2, "no attempt went out with the old engine id"


def test_a_failed_one_is_tried_nowhere_else(deployment: Deployment) -> None:
    deployment.up(2, 2)
    deployment.decodes[0].script(kv_fails=True)
    answer = canary(deployment)
    assert answer.status_code == 500
    assert [fake.state()["received"] for fake in (deployment.prefills[1], deployment.decodes[0])] == [0, 1]


def test_one_that_is_late_is_given_up(deployment: Deployment) -> None:
    deployment.up()
    deployment.prefills[0].script(hold="prefill")
    assert canary(deployment, {"seconds": 0.2}).status_code == 504
    deployment.prefills[0].script(hold="")
    deployment.idle()


def test_one_that_is_not_possible_or_of_somebody_else_is_refused(deployment: Deployment) -> None:
    deployment.up()
    asked: list[dict[str, Any]] = [{"prefill": "decode-0"}, {"decode": "decode-7"}, {"tokens": 0}, {"seconds": "inf"}]
    assert [canary(deployment, what).status_code for what in asked] == [404, 404, 400, 400]
    strangers: list[dict[str, str]] = [{}, {"authorization": "Bearer other"}]
    assert [canary(deployment, headers=headers).status_code for headers in strangers] == [401, 401]
    assert [fake.state()["received"] for fake in deployment.fakes] == [0, 0]
