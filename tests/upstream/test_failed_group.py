"""A load of which one KV group failed: the request is computed anew as a whole, or fails, as the policy says."""

from __future__ import annotations

import pytest

from tests.upstream.run import ALL_VLLM_VERSIONS
from tests.upstream.waiting_loads import facts

pytestmark = [pytest.mark.upstream, pytest.mark.parametrize("version", ALL_VLLM_VERSIONS)]
CRASHES = [version for version in ALL_VLLM_VERSIONS if version < "0.30"]
BY_BLOCK = [version for version in ALL_VLLM_VERSIONS if version < "0.31"]
"""Later a connector of a hybrid model has to name the request; Mooncake and lmcache 0.5.6 do."""
RECOMPUTED = {"computed_anew": True, "tokens": [4, 12], "reason": "length", "all_blocks_free": True}
FAILED = {"computed_anew": False, "tokens": [0, 12], "reason": "error", "all_blocks_free": True}


@pytest.mark.parametrize("group", ["full", "sliding"])
@pytest.mark.parametrize(("policy", "end"), [("recompute", RECOMPUTED), ("fail", FAILED)])
def test_failed_blocks_kill_the_engine_before_vllm_0_30_and_not_with_the_patch(
    version: str, group: str, policy: str, end: dict[str, object]
) -> None:
    seen = facts(version)["failed_group"]
    upstream = seen["unpatched"][f"{group}/{policy}"]
    if version in CRASHES:
        assert upstream == {"dies_of": "ValueError", "says": "too many values to unpack (expected 1)"}
        assert seen["patched"][f"{group}/{policy}"] == end
        assert seen["patched"]["counted"] == 4
    elif version in BY_BLOCK:
        assert upstream == end
    else:
        assert upstream["dies_of"] == "RuntimeError"
        assert "failed_recving" in upstream["says"]


@pytest.mark.parametrize(("policy", "end"), [("recompute", RECOMPUTED), ("fail", FAILED)])
def test_a_failure_by_request_is_upstreams_since_vllm_0_30(version: str, policy: str, end: dict[str, object]) -> None:
    assert facts(version)["failed_group"]["unpatched"].get(f"by_request/{policy}") == (
        None if version in CRASHES else end
    )
