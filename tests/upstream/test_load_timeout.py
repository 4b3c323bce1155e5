"""A load of external KV that hangs is given up, and no other request gets its blocks before the transfer has ended."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

from pdserve.errors import StartError
from pdserve.patches.scheduler.given_up_loads import SETTING, LoadTimeout
from tests.upstream.run import ALL_VLLM_VERSIONS, INSTALLED_VLLM
from tests.upstream.waiting_loads import OURS, WORKLOADS, facts, run

pytestmark = pytest.mark.upstream
each_version = pytest.mark.parametrize("version", ALL_VLLM_VERSIONS)


def seen(version: str, case: str) -> dict[str, Any]:
    results: dict[str, Any] = facts(version)["load_timeout"]["patched"][case]
    return results


@each_version
def test_a_request_whose_load_hangs_waits_for_ever_and_with_the_patch_computes_in_fresh_blocks(version: str) -> None:
    before = facts(version)["load_timeout"]["unpatched"]["hanging"]
    assert (before["status"], before["tokens"]) == ("WAITING_FOR_REMOTE_KVS", [])
    after = seen(version, "hanging")
    assert after["before_the_limit"] == "WAITING_FOR_REMOTE_KVS"
    assert (after["status"], len(after["tokens"]), after["given_up"]) == ("GONE", 4, 1)
    assert after["shared_blocks"] == 0
    assert after["polls"] == 1, "the connector is not asked for the load again"


@each_version
def test_the_old_blocks_stay_in_quarantine_until_the_connector_reports_the_end(version: str) -> None:
    after = seen(version, "hanging")
    assert after["quarantined"] == after["missing_blocks"] == 5
    assert after["hashed_in_quarantine"] == [], "what was never written is no cache hit"
    assert after["keeps_polling_its_workers"], "an engine that sleeps does not hear of the end"
    assert (after["late_ends"], after["quarantined_at_the_end"], after["missing_at_the_end"]) == (1, 0, 0)
    assert after["told_to_the_connector"]
    assert after["idle"]


@each_version
def test_no_time_frees_them(version: str) -> None:
    """Memory is too short for fresh blocks beside those in quarantine."""
    assert seen(version, "no_room") == {"before_the_end": ["WAITING", 0], "tokens": 4, "missing_blocks": 0}


@each_version
def test_a_request_that_gives_up_does_not_stand_before_one_whose_kv_has_arrived(version: str) -> None:
    assert seen(version, "starved") == {"tokens": {"a": 4, "b": 4}, "tokens_at_the_end": 4, "missing_blocks": 0}


@each_version
def test_a_local_prefix_stays_its_owners_and_is_used(version: str) -> None:
    assert seen(version, "shared_prefix") == {
        "shared_with_owner": [True, True],
        "else_shared": 0,
        "references_after_the_end": [2, 2],
        "tokens": 34,
        "missing_blocks": 0,
    }


@each_version
def test_a_client_that_leaves_and_a_save_that_goes_on_change_nothing_about_it(version: str) -> None:
    assert seen(version, "aborted") == {"held": True, "missing_blocks": 0}
    assert seen(version, "saving") == {"blocks_being_saved": True, "missing_blocks": 0, "status": "GONE"}


@each_version
def test_the_ends_of_load_and_save_of_an_aborted_request_may_come_in_one_report(version: str) -> None:
    assert seen(version, "aborted_while_loading") == {"missing_blocks": 0, "status": "GONE"}


@each_version
def test_a_load_that_is_reported_again_does_not_hide_the_end_of_a_send(version: str) -> None:
    again = {"held": "FINISHED_LENGTH_CAPPED", "missing_blocks": 0, "status": "GONE"}
    assert seen(version, "reported_again_with_the_send") == again


@each_version
def test_a_preempted_request_does_not_load_beside_its_own_hanging_load(version: str) -> None:
    assert seen(version, "preempted") == {"finished": True, "tokens": 4, "loads": 1, "missing_blocks": 0}


@each_version
def test_neither_does_another_request_of_the_same_id(version: str) -> None:
    again = seen(version, "id_used_again")
    assert again["status"] == ["RUNNING", "WAITING_FOR_REMOTE_KVS"], "only once the old transfer has ended"
    assert (again["loads"], again["given_up"], again["late_ends"], again["missing_blocks"]) == (2, 2, 2, 0)


@each_version
@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_a_late_failure_hits_no_live_request(version: str, policy: str) -> None:
    whole = {"tokens": [20, 30], "missing_blocks": 0}
    assert seen(version, f"failed_with_policy_{policy}") == {"one_report": whole, "two_reports": whole}


@each_version
def test_nor_does_one_that_names_the_request(version: str) -> None:
    """As connectors report it for hybrid models from vLLM 0.30 on."""
    after = facts(version)["load_timeout"]["patched"].get("failed_by_request")
    assert after == (None if version < "0.30" else {"tokens": 20, "missing_blocks": 0})


@each_version
def test_a_multiconnector_informs_all_its_children_and_counts_their_saves(version: str) -> None:
    after = seen(version, "several_connectors")
    assert (after["tokens"], after["loads"], after["polls"]) == (4, [1, 0], [1, 1])
    assert after["last_allocation"] == [["a", 0], ["a", 0]], "there is nothing to load into the fresh blocks"
    assert after["finished"] == [["a"], ["a"]]
    assert (after["extra_async_saves"], after["missing_blocks"]) == ({"a": 1}, 0)


@each_version
def test_with_overlapping_steps(version: str) -> None:
    assert seen(version, "overlapped") == {"tokens": 4, "missing_blocks": 0}


@each_version
def test_lmcache_stores_the_fresh_kv_and_keeps_no_lock(version: str) -> None:
    assert facts(version)["late_loads"]["unpatched"] == {"tokens": 0}
    after = facts(version)["late_loads"]["patched"]
    assert (after["tokens"], after["lookups"], after["done"]) == (3, 1, True)
    assert (after["locked"], after["trackers"], after["all_blocks_free"]) == (0, 0, True)
    assert after["stored"] > 0


@each_version
def test_random_workloads_with_lmcache_whose_loads_hang(version: str) -> None:
    """Clients leave, requests are preempted, transfers end late; every store and every attention is checked."""
    after = facts(version)["late_loads"]["patched"]
    assert after["simulated"]["given_up"] >= WORKLOADS // 2
    assert after["simulated"]["loads"] > after["simulated"]["given_up"]
    assert after["quarantined"] == 0


def test_the_guard_against_stale_completions_may_be_applied_before_or_after() -> None:
    """Each version sees one order in `facts`; here is the other one for the installed version."""
    guard_first = run(INSTALLED_VLLM, ("stale_completions", *OURS), workloads=3)["load_timeout"]["patched"]
    guard_last = run(INSTALLED_VLLM, (*OURS, "stale_completions"), workloads=3)["load_timeout"]["patched"]
    assert guard_first == guard_last


@pytest.mark.parametrize("seconds", ["0", -1, "nan", "inf"])
def test_a_limit_that_is_none_is_refused(seconds: float | str) -> None:
    with pytest.raises(StartError, match=SETTING):
        LoadTimeout(None, float(seconds))


def test_no_step_looks_at_the_loads_that_wait_before_one_is_overdue() -> None:
    """With 128 of them that cost more than 3 % of a step."""
    looks: list[str] = []

    class Request(SimpleNamespace):
        @property
        def status(self) -> SimpleNamespace:
            looks.append(self.request_id)
            return SimpleNamespace(name="WAITING_FOR_REMOTE_KVS")

    connector = SimpleNamespace(get_num_new_matched_tokens=None, update_state_after_alloc=lambda *_: None)
    requests = [Request(request_id=str(number)) for number in range(128)]
    scheduler = SimpleNamespace(
        connector=connector,
        kv_cache_manager=SimpleNamespace(block_pool=None),
        kv_holding_waiting=deque(requests),
        finished_recving_kv_req_ids=set(),
        requests={each.request_id: each for each in requests},
    )
    now = 100.0
    timeout = LoadTimeout(scheduler, 3, clock=lambda: now)
    for request in requests:
        connector.update_state_after_alloc(request, None, 16)
    timeout.give_up_overdue()
    assert sorted(looks, key=int) == [each.request_id for each in requests], "once, when they have begun"
    looks.clear()
    now += 2
    timeout.give_up_overdue()
    assert looks == []
    scheduler.finished_recving_kv_req_ids.update(scheduler.requests)
    now += 2
    timeout.give_up_overdue()
    assert looks, "at the time of the oldest; all have ended"
