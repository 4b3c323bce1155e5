"""Before vLLM 0.23 loads of external KV can lock each other out of the pool for ever; with the gate they take turns."""

from __future__ import annotations

from typing import Any

import pytest

from pdserve.patches.patch import in_range
from pdserve.patches.scheduler.admission_gate import PATCH
from tests.upstream.guards import guards
from tests.upstream.run import VLLM_VERSIONS

NEEDING = [version for version in VLLM_VERSIONS if in_range(version, PATCH.vllm)]
pytestmark = pytest.mark.upstream

needing = pytest.mark.parametrize("version", NEEDING)
HEADS = [
    "head that needs more",
    "head that needs more, MultiConnector",
    "head that needs more, async scheduling",
    "head that needs more, priorities",
]


def before(version: str, case: str) -> dict[str, Any]:
    seen: dict[str, Any] = guards(version)["admission_gate"]["unpatched"][case]
    return seen


def after(version: str, case: str) -> dict[str, Any]:
    seen: dict[str, Any] = guards(version)["admission_gate"]["patched"][case]
    return seen


@pytest.mark.parametrize("version", VLLM_VERSIONS)
def test_it_is_applied_where_upstream_reserves_no_blocks_for_loads(version: str) -> None:
    assert guards(version)["reserves"] == (version not in NEEDING)


@needing
@pytest.mark.parametrize("case", HEADS)
def test_loads_that_lock_each_other_out_take_turns(version: str, case: str) -> None:
    upstream, gated = before(version, case), after(version, case)
    assert upstream["loading_at_once"] == ["a", "b", "c"]
    assert not upstream["done"], "every load has arrived and nothing can run"
    assert gated["loading_at_once"] == ["a", "b"]
    assert gated["done"]
    assert (gated["free"], gated["deferred"]) == (12, 1)


@needing
@pytest.mark.parametrize("case", HEADS)
def test_a_deferred_request_is_not_looked_up_and_locks_nothing(version: str, case: str) -> None:
    assert after(version, case)["asked"] == ["a", "b"]
    assert after(version, case)["locks"] == []


@pytest.mark.parametrize("version", [version for version in VLLM_VERSIONS if version not in NEEDING])
@pytest.mark.parametrize("case", HEADS)
def test_since_0_23_upstream_takes_turns_itself(version: str, case: str) -> None:
    upstream = before(version, case)
    assert upstream["loading_at_once"] == ["a", "b"]
    assert upstream["done"]


@needing
@pytest.mark.parametrize("case", ["alone", "larger than the pool", "shared prefix"])
def test_these_fare_as_upstream_has_it(version: str, case: str) -> None:
    assert after(version, case) == before(version, case)
    expected = {"alone": "WAITING_FOR_REMOTE_KVS", "larger than the pool": "WAITING"}
    assert after(version, case)["status"] == expected.get(case, "WAITING_FOR_REMOTE_KVS")
    assert after(version, case)["deferred"] == 0


@needing
def test_a_large_request_gets_its_turn_however_many_small_ones_come(version: str) -> None:
    seen = after(version, "stream of small ones")
    assert seen["deferred"] > 1
    assert seen["turn_after_steps"] == before(version, "stream of small ones")["turn_after_steps"]


@needing
def test_a_deferred_request_that_is_aborted_leaves_nothing(version: str) -> None:
    seen = after(version, "aborted while deferred")
    assert (seen["status"], seen["deferred"]) == ("WAITING", 1)
    assert seen["done"]
    assert seen["free"] == 12


@needing
def test_it_stands_before_a_real_connector(version: str) -> None:
    seen = after(version, "MooncakeConnector")
    assert seen["first"] == ["WAITING_FOR_REMOTE_KVS", "WAITING"]
    assert seen["deferred"] == 1
    assert seen["done"]
    assert seen["free"] == 12
