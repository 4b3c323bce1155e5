"""What becomes of a push with the patch nixl-push: vLLM's own scheduler and workers, and NIXL's library, on a CPU.

KV is moved for real, between two workers of one process: by UCX, from host memory to host memory.
"""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import Any

import pytest

from tests.upstream.run import INSTALLED_VLLM, probe

pytestmark = [
    pytest.mark.upstream,
    pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="NIXL's library is not installed"),
]

COMPUTED = 128
"""All tokens of the prompt, by decode."""


@cache
def seen() -> dict[str, Any]:
    results: dict[str, Any] = probe(INSTALLED_VLLM, "tests.upstream.probes.nixl_push_ends")
    return results


def saw(case: str) -> dict[str, Any]:
    found: dict[str, Any] = seen()[case]["saw"]
    return found


def counted(case: str) -> set[str]:
    return set(seen()[case]["counted"])


def test_it_applies() -> None:
    assert seen()["verdict"] == "apply"


def test_what_the_proxy_sends_to_decode_is_made_of_prefills_own_answer() -> None:
    """And all requests of decode here have it; those of prefill have the proxy's words too."""
    assert seen()["address"] == [
        "dcp_size",
        "do_remote_decode",
        "do_remote_prefill",
        "pp_size",
        "remote_engine_id",
        "remote_host",
        "remote_port",
        "remote_request_id",
        "tp_size",
    ]


@pytest.mark.parametrize("case", ["prefill_first", "decode_first"])
def test_kv_arrives_whole_whichever_leg_is_first_and_both_are_free_again(case: str) -> None:
    """Of decode's first step the last token of the prompt is computed, and its own first token after it."""
    assert saw(case) == {"here": True, "same": True, "computed": 2, "free": True}
    assert counted(case) == set()


def test_a_client_that_leaves_while_prefill_has_not_heard_of_the_prompt_leaves_no_blocks() -> None:
    assert saw("client_leaves") == {"registered": True, "held": True, "free": True, "left": []}
    assert counted("client_leaves") == {
        "registrations-withdrawn",
        "registrations-cleared",
        "withdrawals-answered",
    }


def test_what_prefill_computes_for_a_client_that_has_left_is_free_before_the_lease_ends() -> None:
    assert saw("client_leaves_before_prefill_has_computed") == {
        "told": True,
        "free": True,
        "within_the_lease": True,
        "writer_waits_for": [],
    }


def test_one_that_leaves_before_the_registration_is_sent_is_free_at_once() -> None:
    assert saw("client_leaves_before_the_registration") == {"free": True, "registered": False}
    assert counted("client_leaves_before_the_registration") == {"registrations-withdrawn", "registrations-unsent"}


def test_one_that_leaves_decodes_queue_has_prefill_drop_what_it_keeps() -> None:
    assert saw("client_leaves_decodes_queue") == {"held": True, "free": True, "entries": []}


def test_a_push_that_never_comes_has_the_prompt_computed_and_loses_no_block() -> None:
    found = saw("never_pushed")
    assert (found["end"], found["free"]) == ("length", True)
    assert found["computed"] >= COMPUTED
    assert "registrations-expired" in counted("never_pushed")


@pytest.mark.parametrize("case", ["prefill_aborts", "lease_ends_before_decode_asks", "a_write_that_fails"])
def test_decode_is_told_at_once_when_prefill_will_not_write(case: str) -> None:
    """No time of upstream's or ours has passed for it."""
    found = saw(case)
    assert (found["ended"], found["free"]) == (True, True)
    assert found["computed"] >= COMPUTED
    assert "registrations-cleared" in counted(case)
    assert "registrations-expired" not in counted(case)


def test_heartbeats_of_decode_extend_the_lease_though_it_does_not_know_prefills_id() -> None:
    assert saw("heartbeats") == {"named": True, "extended": True, "free": True}


def test_blocks_outlive_their_lease_while_a_write_reads_them() -> None:
    assert saw("write_outlives_the_lease") == {"writes": True, "kept": True, "free": True}
    assert "leases-outlived" in counted("write_outlives_the_lease")


def test_a_withdrawal_is_answered_when_the_write_has_ended() -> None:
    assert saw("withdrawn_while_it_is_written") == {"writes": True, "asked": True, "kept": True, "free": True}
    assert "registrations-cleared" in counted("withdrawn_while_it_is_written")


def test_no_write_begins_after_its_lease() -> None:
    assert saw("write_after_the_lease") == {"begun": [], "free": True}
    assert "writes-refused" in counted("write_after_the_lease")


@pytest.mark.parametrize("case", ["engine_gone", "another_engine"])
def test_a_prefill_engine_that_is_gone_stands_for_its_answer(case: str) -> None:
    assert saw(case) == {"held": True, "free": True}
    assert "registrations-orphaned" in counted(case)
