"""LMCache as a child of MultiConnector: its lookups' locks, its blocks, and requests whose load failed elsewhere.

The real scheduler role of LMCacheMPConnector in the real Scheduler; a strict lock book stands in for the server, and
every block has contents. Against a real server: the last test.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.upstream.multiconnector import measured
from tests.upstream.run import INSTALLED_VLLM, VLLM_VERSIONS, probe

pytestmark = pytest.mark.upstream
every_version = pytest.mark.parametrize("version", VLLM_VERSIONS)
both_classes = pytest.mark.parametrize("child", ["ours", "both ours"])


def measured_case(version: str, case: str) -> Any:
    return measured(version)["lmcache"][case]


@every_version
@both_classes
def test_a_load_begins_without_waiting_for_lmcaches_lookup_and_its_locks_are_given_back(
    version: str, child: str
) -> None:
    upstream, ours = measured_case(version, "overtaken")["upstream"], measured_case(version, "overtaken")[child]
    assert (upstream["steps"], upstream["mock"], upstream["locked"]) == (6, [512], 0)
    assert ours == {
        "steps": 1,
        "done": True,
        "mock": [512],
        "loads": [],
        "locked": 0,
        "stored": 0,
        "sessions": 1,
    }


@every_version
def test_overtaking_alone_would_leave_every_chunk_locked(version: str) -> None:
    assert measured_case(version, "without keeper")["locked"] == 8


@every_version
@both_classes
def test_lmcache_is_waited_for_when_it_has_more_weight(version: str, child: str) -> None:
    ours = measured_case(version, "heavier")[child]
    assert (ours["loads"], ours["mock"], ours["locked"]) == ([[0, 512]], [], 0)


@every_version
@both_classes
def test_a_request_that_ends_before_it_has_blocks_leaves_no_locks(version: str, child: str) -> None:
    upstream, ours = measured_case(version, "aborted")["upstream"], measured_case(version, "aborted")[child]
    assert {case: upstream[case]["locked"] for case in upstream} == {"unanswered": 4, "answered": 4}
    assert {case: ours[case]["locked"] for case in ours} == {"unanswered": 0, "answered": 0}


@every_version
@both_classes
def test_an_overtaken_lookup_is_the_requests_own_again_after_a_preemption(version: str, child: str) -> None:
    assert measured_case(version, "preempted")[child] == {"preempted": True, "done": True, "locked": 0}


@every_version
def test_a_child_that_does_not_load_stores_the_blocks_of_the_requests_own_tokens(version: str) -> None:
    """Before vLLM 0.26 it was given none, and stored those of other tokens (vllm#46865): plan/versions.py refuses."""
    right = {"done": True, "stored": 512}
    assert measured_case(version, "stores") == {"upstream": right, "ours": right, "both ours": right}


@every_version
@both_classes
def test_a_request_whose_load_failed_elsewhere_waits_for_ever_for_a_hit_that_lmcache_never_loads(
    version: str, child: str
) -> None:
    """And no more locks are left than the request's own load gives back."""
    upstream, ours = measured_case(version, "failed_load")["upstream"], measured_case(version, "failed_load")[child]
    assert upstream == {"done": False, "status": "WAITING_FOR_REMOTE_KVS", "locked": 8}
    assert ours == {"done": True, "status": "GONE", "locked": 0}


def test_no_read_lock_is_left_on_a_real_server() -> None:
    """Four chunks a prompt. Without the keeper they stay locked; after an abort with upstream the job stays too."""
    results = probe(INSTALLED_VLLM, "tests.upstream.probes.multiconnector_server")
    clean = {"objects": 20, "locked": 0, "jobs": 0, "sessions": 0}
    assert results["loaded"] == {"trackers": 0, **clean}
    assert results["overtaken"] == {"after one step": "WAITING_FOR_REMOTE_KVS", **clean}
    assert results["aborted"] == clean
    released = results["effects"].pop("lookups-released")
    # On a busy machine a request can end before the answer to its lookup is here: the end of its session releases it.
    assert released in (1, 2)
    assert results["effects"] == {"instances": 1, "pending-lookups-overtaken": 1}
    without, upstream = results["overtaken without keeper"], results["upstream aborted"]
    # There too the request may have taken the answer: then its job is gone, and the locks stay.
    assert (without["locked"], without["jobs"] in (0, 1)) == (4, True)
    assert (upstream["locked"], upstream["jobs"] - without["jobs"]) == (8, 1)
