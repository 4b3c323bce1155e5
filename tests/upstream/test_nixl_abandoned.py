"""KV that a prefill has kept for a client that was leaving: NIXL's lease holds it, unless the patch ends that.

On the real Scheduler, both real halves of NixlConnector and the real OutputProcessor.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from tests.upstream.run import ALL_VLLM_VERSIONS, probe

# All of them: the patch relies on the bodies of NIXL's methods, and those differ from release to release.
pytestmark = [pytest.mark.upstream, pytest.mark.parametrize("version", ALL_VLLM_VERSIONS)]

EVERYTHING_FREE = [[], True]


@cache
def seen(version: str) -> dict[str, Any]:
    results: dict[str, Any] = probe(version, "tests.upstream.probes.nixl_abandoned")
    return results


def before_and_after(version: str, case: str) -> tuple[Any, Any, int]:
    """What was seen without and with the patch, and how many leases it has ended."""
    results = seen(version)
    assert results["unpatched"][case]["ended"] == 0
    return results["unpatched"][case]["saw"], results["patched"][case]["saw"], results["patched"][case]["ended"]


def test_it_applies(version: str) -> None:
    assert seen(version)["verdict"] == "apply"


@pytest.mark.parametrize("case", ["before_the_workers_know_of_the_lease", "by_two_workers", "under_multiconnector"])
def test_an_abort_of_a_finished_request_ends_its_lease(version: str, case: str) -> None:
    before, after, ended = before_and_after(version, case)
    assert before == [["a"], False]
    assert (after, ended) == (EVERYTHING_FREE, 1)


def test_other_leases_live_on_and_end_as_ever(version: str) -> None:
    before, after, ended = before_and_after(version, "among_others")
    assert before == [["a", "b", "c", "d"], ["b", "c", "d"]]
    assert (after, ended) == ([["a", "b", "d"], ["b", "d"]], 1)


def test_an_abort_that_comes_more_than_once_ends_a_lease_once(version: str) -> None:
    """vLLM counts that as an expired request."""
    before, after, ended = before_and_after(version, "again_and_again")
    assert before == [["a"], 0]
    assert (after, ended) == ([[], 1], 1)


@pytest.mark.parametrize(
    ("case", "seen_both_times"),
    [
        ("of_everything", ["a"]),
        ("of_a_request_that_is_computed", [*EVERYTHING_FREE, 0]),
        ("of_mooncake", "FINISHED_LENGTH_CAPPED"),
    ],
)
def test_what_is_left_to_upstream(version: str, case: str, seen_both_times: Any) -> None:
    assert before_and_after(version, case) == (seen_both_times, seen_both_times, 0)


def test_upstream_sends_an_abort_only_while_it_has_not_seen_the_end(version: str) -> None:
    """So whoever is named in an abort has given nobody the parameters by which a decode could pull its KV."""
    sent = seen(version)["sent"]["unpatched"]
    assert {when: names for when, names in sent.items() if names} == {
        "computed": ["computed"],
        "by its outer name": ["by its outer name"],
        "some children finished": ["0_parent", "2_parent"],
    }


def test_with_the_patch_it_also_sends_an_abort_for_an_end_that_no_request_takes(version: str) -> None:
    sent = seen(version)["sent"]
    assert sent["patched"] == sent["unpatched"] | {"not taken yet": ["unread"]}


def test_nor_is_an_answer_kept_for_whom_uvicorn_has_no_connection_any_more(version: str) -> None:
    assert seen(version)["answers"] == {
        "the client has left": ["a"],
        "the client is there": [],
        "nothing is kept": [],
        "kept by a decode": [],
        "an event of a stream": [],
    }
