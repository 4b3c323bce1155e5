"""Random KV-starved workloads: loads, failed loads, aborts, preemptions, late sends and bogus notifications.

At every step each block is free once or held as often as it is counted, and nothing is freed or run under a transfer;
at the end every request has its tokens and no block, lock or request is left. More of them by hand: see the probe.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.upstream.guards import guards
from tests.upstream.run import VLLM_VERSIONS

pytestmark = [pytest.mark.upstream, pytest.mark.parametrize("version", VLLM_VERSIONS)]

CASCADING = "0.27.1"
"""vllm#49674: see test_preemption_cascade."""


def simulated(version: str) -> dict[str, Any]:
    seen: dict[str, Any] = guards(version)["simulation"]
    return seen


def test_with_our_patches_nothing_goes_wrong(version: str) -> None:
    for way, seen in simulated(version)["patched"].items():
        if way == "overlapping" and version == CASCADING:
            assert seen["kinds"].keys() == {"ok", "endless"}
            continue
        assert seen["failures"] == {}
        assert seen["kinds"] == {"ok": seen["runs"]}
        assert seen["noises"] > 10 * seen["runs"]


def test_upstream_alone_dies_of_bogus_notifications(version: str) -> None:
    seen = simulated(version)["unguarded"]["noise"]
    assert seen["kinds"]["crash"] > seen["runs"] / 2


def test_and_of_true_notifications_about_aborted_loads(version: str) -> None:
    seen = simulated(version)["unguarded"]["quiet"]
    assert seen["kinds"]["crash"] > 0
    assert "_update_from_kv_xfer_finished" in seen["failures"]["crash"]


def test_deadlocks_of_upstream_are_seen(version: str) -> None:
    """Before 0.31 of a queue head that stops those whose KV has arrived.

    Since 0.31 only when a load fails in a hybrid model: see test_failed_loads_stand_back.
    """
    seen = simulated(version)["guarded"]
    kinds = {kind for by_cap in seen.values() for kind in by_cap["kinds"]}
    assert kinds <= {"ok", "deadlock"} | ({"endless"} if version == CASCADING else set())
    if not guards(version)["loaded_go_first"]:
        assert "deadlock" in kinds
