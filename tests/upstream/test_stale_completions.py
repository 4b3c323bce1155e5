"""Notifications of KV transfers that are late, doubled or of no request: upstream dies of them, with the guard
none counts.

All on the real Scheduler, with a mock connector and with MooncakeConnector and MultiConnector.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.upstream.guards import guards
from tests.upstream.run import VLLM_VERSIONS

pytestmark = [pytest.mark.upstream, pytest.mark.parametrize("version", VLLM_VERSIONS)]

LIVE_LOAD = {"loads-of-live-requests": 1}


def before_and_after(version: str, case: str) -> tuple[dict[str, Any], dict[str, Any]]:
    seen = guards(version)["stale_completions"]
    return seen["unpatched"][case], seen["patched"][case]


@pytest.mark.parametrize(
    "case",
    [
        "load twice",
        "load twice, async scheduling",
        "load twice, MultiConnector",
        "load twice, MooncakeConnector",
        "load twice, two KV groups",
    ],
)
def test_a_load_that_is_reported_again_while_its_request_runs_changes_nothing(version: str, case: str) -> None:
    before, after = before_and_after(version, case)
    assert before["died"] == "_update_from_kv_xfer_finished"
    assert after["dropped"] == LIVE_LOAD
    assert after["kept_its_blocks"]
    assert after["tokens"] == 30
    assert_everything_came_back(after)


@pytest.mark.parametrize("case", ["preempted", "arrived without room"])
def test_nor_does_it_for_a_request_that_waits_for_blocks(version: str, case: str) -> None:
    before, after = before_and_after(version, case)
    assert before["died"] == "_update_from_kv_xfer_finished"
    assert after["status"] == {"preempted": "PREEMPTED", "arrived without room": "WAITING with 4 blocks"}[case]
    assert after["dropped"] == LIVE_LOAD
    assert after["tokens"] == {"preempted": 100, "arrived without room": 4}[case]
    assert_everything_came_back(after)


def test_an_id_that_is_used_again_is_not_mistaken_for_its_predecessor(version: str) -> None:
    before, after = before_and_after(version, "id used again")
    assert before["died"] == "_update_from_kv_xfer_finished"
    assert after["dropped"] == {"loads-of-live-requests": 1, "sends-of-live-requests": 1}
    assert after["kept_its_blocks"]
    assert_everything_came_back(after)


@pytest.mark.parametrize(
    ("case", "effect"),
    [("load of no request", "loads-of-gone-requests"), ("send of no request", "sends-of-gone-requests")],
)
def test_a_notification_of_a_request_that_is_gone_is_dropped(version: str, case: str, effect: str) -> None:
    before, after = before_and_after(version, case)
    assert before["died"] == "_update_from_kv_xfer_finished"
    assert after["dropped"] == {effect: 1}


@pytest.mark.parametrize(
    ("case", "status"),
    [("send of a running request", "RUNNING"), ("send of a loading request", "WAITING_FOR_REMOTE_KVS")],
)
def test_a_send_frees_no_live_request(version: str, case: str, status: str) -> None:
    before, after = before_and_after(version, case)
    assert before["died"] == "_free_blocks"
    assert after["status"] == status
    assert after["dropped"] == {"sends-of-live-requests": 1}
    assert_everything_came_back(after)


def test_an_aborted_load_that_is_reported_as_a_send_too_is_freed_once(version: str) -> None:
    before, after = before_and_after(version, "load and send of an aborted request")
    assert before["died"] == "_update_from_kv_xfer_finished"
    assert after["dropped"] == {"sends-with-a-load": 1}
    assert_everything_came_back(after)


def test_blocks_of_an_aborted_load_are_kept_until_the_load_has_ended_whatever_a_send_reports(version: str) -> None:
    before, after = before_and_after(version, "send before the load of an aborted request")
    assert before["died"] == "_update_from_kv_xfer_finished"
    assert not after["freed_under_the_load"]
    assert after["dropped"] == {"sends-before-a-load": 1}
    assert_everything_came_back(after)


@pytest.mark.parametrize(
    ("case", "held"),
    [("load of an aborted request", "FINISHED_ABORTED"), ("load of a finished request", "FINISHED_LENGTH_CAPPED")],
)
def test_what_upstream_frees_is_still_freed(version: str, case: str, held: str) -> None:
    before, after = before_and_after(version, case)
    assert before == after
    assert after["held"] == held
    assert after["dropped"] == {}
    assert_everything_came_back(after)


def test_blocks_that_are_being_sent_are_kept_when_the_load_is_reported_again(version: str) -> None:
    before, after = before_and_after(version, "load twice of a finished request")
    assert before["died"] == "_update_from_kv_xfer_finished", "upstream frees them, and dies of the send's end"
    assert not after["freed_under_the_send"]
    assert after["held"] == "FINISHED_LENGTH_CAPPED"
    assert after["dropped"] == {"loads-of-sending-requests": 1}
    assert_everything_came_back(after)


def test_the_end_of_a_second_load_frees_an_aborted_request_as_upstream_does(version: str) -> None:
    before, after = before_and_after(version, "second load of an aborted request")
    assert before == after
    assert after["then"] == "GONE"
    assert after["dropped"] == {}
    assert_everything_came_back(after)


def test_a_send_frees_a_finished_request_once(version: str) -> None:
    before, after = before_and_after(version, "send of a finished request")
    assert before["died"] == "_update_from_kv_xfer_finished"
    assert (after["held"], after["then"]) == ("FINISHED_LENGTH_CAPPED", "GONE")
    assert after["dropped"] == {"sends-of-gone-requests": 1}
    assert_everything_came_back(after)


def test_a_second_report_before_the_requests_turn_is_upstreams_to_take(version: str) -> None:
    before, after = before_and_after(version, "load twice before its turn")
    assert before == after
    assert after["dropped"] == {}
    assert after["tokens"] == 4


def test_the_connector_hears_everything_and_what_it_adds_is_looked_at(version: str) -> None:
    _, heard = before_and_after(version, "connector hears everything")
    assert heard["received"] == ["a", "nobody"]
    assert heard["sent"] == ["nobody"]
    before, added = before_and_after(version, "added by the connector")
    assert "died" in before
    assert added["status"] == "RUNNING"
    assert added["dropped"] == {"sends-of-gone-requests": 1, "sends-of-live-requests": 1}


def test_another_wrapper_of_the_same_method_hears_everything_in_either_order(version: str) -> None:
    everything = [["a"], ["nobody"]]
    assert guards(version)["stale_completions"]["others"] == {"inside": everything, "outside": everything}


def assert_everything_came_back(seen: dict[str, Any]) -> None:
    assert seen["left"] == []
    assert seen["free_at_the_end"] in (20, 40)
