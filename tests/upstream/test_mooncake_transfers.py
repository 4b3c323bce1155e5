"""Pulls that go wrong, between two real MooncakeConnectors over the real transfer engine and side channel.

Prefill's abort timeout is 6 s without the patches and 60 s with them (upstream's default: 480 s).
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.upstream.mooncake import measured
from tests.upstream.run import VLLM_VERSIONS

pytestmark = [pytest.mark.upstream, pytest.mark.parametrize("version", VLLM_VERSIONS)]

UNPATCHED_ABORT_SECONDS = 6
"""As in mooncake_steps.py, which only a probe can import."""
AT_ONCE = 30
"""Seconds. A fraction of one is what it takes; the rest is for a busy machine. Half of the abort timeout with the
patches, and no timer of theirs lies between. Without them it is only seen that it happens at all."""
HAS_FAILURES = ("0.30.0", "0.32.0", "0.33.0")
"""From here on decode reports a pull that failed; before, its request waits for ever."""


def both(version: str, scenario: str) -> tuple[Any, Any]:
    unpatched, patched = measured(version)[scenario]
    return unpatched, patched


def test_a_worker_cannot_be_built_without_an_accelerator_unless_patched(version: str) -> None:
    unpatched, patched = both(version, "construction")
    assert "accelerator" in unpatched
    assert patched is None


def test_every_released_version_is_known_code(version: str) -> None:
    assert set(measured(version)["verdicts"].values()) == {"apply"}


def test_kv_arrives_unchanged_with_and_without_the_patches(version: str) -> None:
    for seen in both(version, "transfer"):
        assert seen["equal"] == [True, True]
        assert seen["freed"] is not None


def test_25_departed_clients_stall_a_prefill_until_its_abort_timeout_unless_patched(version: str) -> None:
    unpatched, patched = both(version, "departed")
    # From the first pull on: how long it took until all had left is a matter of the machine.
    assert unpatched["served"] is None or unpatched["since the first pull"] > 0.9 * UNPATCHED_ABORT_SECONDS
    assert unpatched["freed"] is None, "decode's blocks"
    assert patched["served"] < AT_ONCE
    assert patched["freed"] < AT_ONCE
    assert patched["kept"] == 0, "nothing is left of them in the prefill worker"


def test_pulls_that_wait_for_their_prefills_do_not_stall_others(version: str) -> None:
    unpatched, patched = both(version, "waiting")
    assert unpatched["served"] is None or unpatched["since the first pull"] > 0.9 * UNPATCHED_ABORT_SECONDS
    assert patched["served"] < AT_ONCE


def test_a_pull_for_a_prefill_that_was_aborted_before_is_answered_at_once(version: str) -> None:
    unpatched, patched = both(version, "late_pull")
    assert unpatched == {"fail": [None, None], "recompute": [None, None]}
    assert patched["fail"][0] < AT_ONCE
    assert patched["recompute"][0] < AT_ONCE
    assert (patched["fail"][1], patched["recompute"][1]) == ("error", "length")


def test_a_client_that_leaves_decode_takes_its_pull_along(version: str) -> None:
    unpatched, patched = both(version, "left_before_prefill")
    assert unpatched["freed"] is None
    assert unpatched["written"]
    assert patched["freed"] < AT_ONCE
    assert not patched["written"], "the blocks are another request's by then"
    assert patched["prefill freed"] < AT_ONCE, "a prefill that comes all the same keeps no KV for it"


def test_blocks_are_not_released_while_they_are_written(version: str) -> None:
    for seen in both(version, "left_during_write"):
        assert seen["freed during the write"] is None
        assert seen["freed after it"] < AT_ONCE


def test_all_prefill_workers_must_have_ended_before_blocks_are_released(version: str) -> None:
    unpatched, patched = both(version, "one_of_two_fails")
    if version in ("0.30.0", "0.32.0"):
        assert unpatched["freed during the write"] is not None, "another request's KV would be overwritten"
    if version not in HAS_FAILURES:
        assert unpatched["failed"] is None
    assert patched["failed"] < AT_ONCE
    assert patched["freed during the write"] is None
    assert patched["freed after it"] < AT_ONCE


def test_a_killed_prefill_is_noticed_and_its_address_forgotten(version: str) -> None:
    unpatched, patched = both(version, "killed")
    assert unpatched["ended"] is None
    assert not unpatched["forgotten"]
    assert patched["ended"] is not None
    assert patched["freed"] < AT_ONCE
    assert patched["reason"] == "error"
    assert patched["forgotten"]
    assert patched["asked again"] < AT_ONCE


def test_a_stopped_prefill_is_not_dead(version: str) -> None:
    """It may write when it goes on."""
    for seen in both(version, "killed"):
        assert seen["stopped"]["gave up"] is None
        assert seen["stopped"]["then served"] is not None


def test_a_prefill_without_the_patch_is_not_broken_by_a_withdrawal(version: str) -> None:
    for seen in both(version, "other_peer"):
        assert seen["freed early"] is None, "it may still write"
        assert seen["freed by the transfer"] < AT_ONCE
        assert seen["next served"] is not None
    _, patched = both(version, "other_peer")
    assert patched["a rejected one is pulled"], "there is no other way to have its KV freed"
    assert patched["released by its transfer"] < AT_ONCE
    assert measured(version)["effects"]["mooncake-pulls/withdrawals-refused"] == 2


def test_a_pull_whose_connection_broke_is_withdrawn_over_a_new_one(version: str) -> None:
    unpatched, patched = both(version, "reconnected")
    assert unpatched["ended"] is None
    assert patched["ended"] < AT_ONCE
    assert patched["reason"] == "error"
    assert not patched["written"]


def test_a_transfer_that_prefills_worker_does_not_know_is_no_error(version: str) -> None:
    assert both(version, "unknown_transfer") == ("KeyError", None)


def test_blocks_of_a_second_prefill_with_the_same_transfer_id_are_freed(version: str) -> None:
    unpatched, patched = both(version, "same_id_twice")
    assert unpatched["freed"] is None
    assert patched["freed"] < AT_ONCE


def test_a_prefill_that_is_aborted_in_the_batch_of_another_with_its_id_takes_no_kv_along(version: str) -> None:
    unpatched, patched = both(version, "same_id_in_one_batch")
    assert unpatched["served"] is None
    assert patched["served"] < AT_ONCE
    assert patched["equal"]


def test_without_an_answer_blocks_are_kept_until_prefill_has_let_go_or_is_gone(version: str) -> None:
    """A write goes on, or could: a stopped prefill may write when it goes on."""
    unpatched, patched = both(version, "unanswered")
    for case in ("writing", "stopped"):
        if version in HAS_FAILURES:
            assert unpatched[case]["freed"] is not None, "another request's KV would be overwritten"
        assert patched[case]["freed"] is None
    assert patched["writing"]["freed then"] < AT_ONCE
    assert patched["stopped"]["freed then"] is not None


def test_without_an_answer_a_pull_that_prefill_lets_go_fails(version: str) -> None:
    _, patched = both(version, "unanswered")
    assert patched["nothing comes"]["freed"] < AT_ONCE
    assert patched["nothing comes"]["reason"] == "error"
    assert not patched["nothing comes"]["written"], "its prefill came after all"


def test_a_restarted_prefill_registers_beside_a_live_bootstrap_server(version: str) -> None:
    unpatched, patched = both(version, "bootstrap")
    refused = ("beside a living one", "after a dead one", "its other rank")
    assert [unpatched[name] for name in refused] == [400, 400, 400]
    assert [patched[name] for name in refused] == [400, 200, 200], "only the dead give way"
    assert patched["the same again, moved"] == 200
    assert (patched["known"], patched["known then"]) == ("one", ["two", ["0", "1"]])


def test_2000_rejected_requests_take_no_sockets_from_the_others_unless_unpatched(version: str) -> None:
    unpatched, patched = both(version, "rejected")
    assert unpatched["served"] is None, "the request between them: the sockets are gone"
    assert unpatched["ended"] is None
    assert unpatched["kept"] > 0, "at prefill, which has never heard of them"
    assert patched["served"] < AT_ONCE
    assert patched["ended"] < AT_ONCE
    assert patched["descriptors"] < 20
    assert patched["kept"] == 0


def test_a_prefill_frees_the_kv_of_a_request_that_decode_rejects_whichever_is_first(version: str) -> None:
    _, patched = both(version, "rejected_by_decode")
    assert patched["after its prefill"] < AT_ONCE
    assert patched["before it"] < AT_ONCE


def test_pulls_beyond_the_limit_wait_without_a_socket_and_in_order(version: str) -> None:
    unpatched, patched = both(version, "more_than_at_once")
    assert unpatched["asked"] == ["t0", "t1", "t2", "t3", "t4", "t5"]
    assert patched["asked"] == ["t0", "t1"]
    assert patched["freed"] < AT_ONCE, "those whose clients left while they waited"
    assert not patched["kept for it"], "prefill was told all the same"
    assert patched["served"] < AT_ONCE
    assert patched["reasons"] == ["length"] * 4


def test_without_a_descriptor_a_pull_fails_at_once_and_later_ones_do_not(version: str) -> None:
    _, patched = both(version, "no_descriptors")
    assert patched["ended"] < AT_ONCE
    assert patched["reason"] == "error"
    assert patched["then served"] < AT_ONCE


def test_what_the_patches_do_is_counted(version: str) -> None:
    assert measured(version)["undeclared"] == []
    silent = {name for name, count in measured(version)["effects"].items() if count == 0}
    assert silent == set()
