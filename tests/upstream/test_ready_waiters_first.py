"""Who has its KV runs before those who would need the blocks that it holds."""

from __future__ import annotations

from typing import Any

import pytest

from tests.upstream.run import ALL_VLLM_VERSIONS
from tests.upstream.waiting_loads import facts

pytestmark = [pytest.mark.upstream, pytest.mark.parametrize("version", ALL_VLLM_VERSIONS)]
OLD = [version for version in ALL_VLLM_VERSIONS if version < "0.31"]
STUCK = {
    "behind_a_deferred_request": ["head", "loaded"],
    "behind_a_higher_priority": ["loaded", "urgent"],
}


def before(version: str, case: str) -> dict[str, Any]:
    results: dict[str, Any] = facts(version)["ready_waiters"]["unpatched"][case]
    return results


def after(version: str, case: str) -> dict[str, Any]:
    """With the patch; from vLLM 0.31 on it is not applied, and upstream's own queue does it."""
    results: dict[str, Any] = facts(version)["ready_waiters"]["patched" if version in OLD else "unpatched"][case]
    return results


@pytest.mark.parametrize("case", ["behind_a_deferred_request", "behind_a_higher_priority"])
def test_a_head_without_room_stops_everything_before_vllm_0_31_and_not_with_the_patch(version: str, case: str) -> None:
    if version in OLD:
        assert before(version, case) == {"order": [], "stuck": STUCK[case], "free": False}
    other = next(name for name in STUCK[case] if name != "loaded")
    assert after(version, case) == {"order": ["loaded", other], "stuck": [], "free": True}


def test_a_request_whose_load_has_failed_returns_its_blocks_and_stands_back(version: str) -> None:
    assert after(version, "behind_a_failed_request")["stuck"] == []


def test_the_order_is_kept_among_those_with_kv_and_among_those_without(version: str) -> None:
    assert after(version, "fair_otherwise") == {"order": ["b", "d", "a", "c"], "stuck": []}


def test_clients_may_leave_from_every_part_of_the_queue(version: str) -> None:
    assert after(version, "aborted") == {"counted": [0, 3], "stuck": [], "free": True}


def test_overtakings_are_counted(version: str) -> None:
    patched = facts(version)["ready_waiters"].get("patched")
    if version not in OLD:
        assert patched is None
    else:
        deferred, urgent, two_of_four = 1, 1, 2
        assert patched["overtakings"] == deferred + urgent + two_of_four
