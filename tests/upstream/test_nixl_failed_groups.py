"""A NIXL receive that has failed: the request is computed anew or fails, with several KV groups as with one.

On the real Scheduler and both real halves of NixlConnector.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from tests.upstream.run import ALL_VLLM_VERSIONS, probe

SILENT = [version for version in ALL_VLLM_VERSIONS if version < "0.30"]
RIGHT = [version for version in ALL_VLLM_VERSIONS if version not in SILENT]
pytestmark = pytest.mark.upstream

FAILURES = ("the handshake", "the transfer")
NONSENSE = {"computed_anew": False, "tokens": [4, 12], "reason": "length", "all_blocks_free": True}
"""Four tokens, of a prompt whose KV neither came nor was computed."""
POLICIES = {
    "recompute": {"computed_anew": True, "tokens": [4, 12], "reason": "length", "all_blocks_free": True},
    "fail": {"computed_anew": False, "tokens": [0, 12], "reason": "error", "all_blocks_free": True},
}


@cache
def seen(version: str) -> dict[str, Any]:
    results: dict[str, Any] = probe(version, "tests.upstream.probes.nixl_failed_groups")
    return results


@pytest.mark.parametrize("version", ALL_VLLM_VERSIONS)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("what", FAILURES)
def test_with_one_group_upstream_does_what_the_policy_says(version: str, policy: str, what: str) -> None:
    assert seen(version)["unpatched"][f"one group/{what}/{policy}"] == POLICIES[policy]


@pytest.mark.parametrize("version", SILENT)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("what", FAILURES)
def test_with_several_groups_nonsense_is_answered_before_0_30_and_not_with_the_patch(
    version: str, policy: str, what: str
) -> None:
    assert seen(version)["unpatched"][f"{what}/{policy}"] == NONSENSE
    assert seen(version)["patched"][f"{what}/{policy}"] == POLICIES[policy]


@pytest.mark.parametrize("version", SILENT)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_failure_of_one_worker_of_two_is_one_of_the_request(version: str, policy: str) -> None:
    assert seen(version)["patched"][f"one of two workers/{policy}"] == POLICIES[policy]


@pytest.mark.parametrize("version", SILENT)
def test_one_group_is_left_as_it_was(version: str) -> None:
    for policy, end in POLICIES.items():
        for what in FAILURES:
            assert seen(version)["patched"][f"one group/{what}/{policy}"] == end


@pytest.mark.parametrize("version", SILENT)
def test_it_applies_and_counts(version: str) -> None:
    """Four receives by one worker; and of two workers first the one that fails at once, then the other."""
    assert seen(version)["verdict"] == "apply"
    failed, recomputed = seen(version)["counted"]
    assert failed == len(POLICIES) * (len(FAILURES) + 2)
    assert recomputed >= len(POLICIES) * (len(FAILURES) + 1)


@pytest.mark.parametrize("version", RIGHT)
def test_since_0_30_upstream_is_right_with_several_groups(version: str) -> None:
    assert seen(version)["verdict"] == "not-needed"
    for policy, end in POLICIES.items():
        for case in (*FAILURES, "one of two workers"):
            assert seen(version)["unpatched"][f"{case}/{policy}"] == end
