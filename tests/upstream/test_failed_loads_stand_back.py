"""Who has lost its load must not stop those whose load has arrived (hybrid models), nor its own next load."""

from __future__ import annotations

import pytest

from tests.upstream.guards import guards
from tests.upstream.run import VLLM_VERSIONS

REPORTING = [version for version in VLLM_VERSIONS if version >= "0.30"]
pytestmark = pytest.mark.upstream


@pytest.mark.parametrize("version", REPORTING)
def test_a_failed_load_that_finds_no_room_stops_everything_upstream(version: str) -> None:
    seen = guards(version)["failed_loads"]["unpatched"]
    assert seen["loading"] == ["arrives", "fails"]
    assert seen["tokens"] == {"arrives": 0, "fails": 0}


@pytest.mark.parametrize("version", REPORTING)
def test_with_the_patch_it_runs_after_those_that_have_their_kv(version: str) -> None:
    """0.30 by ready-waiters-first, later by failed-loads-stand-back."""
    for seen in guards(version)["failed_loads"]["patched"]:
        assert seen["tokens"] == {"arrives": 4, "fails": 4}
        assert seen["free"]
        assert seen["stood_back"] == (version > "0.31")


@pytest.mark.parametrize("version", VLLM_VERSIONS)
def test_before_0_30_no_worker_can_report_a_failed_load_of_several_groups(version: str) -> None:
    assert (guards(version)["failed_loads"]["unpatched"] is not None) == (version in REPORTING)


@pytest.mark.parametrize("version", VLLM_VERSIONS)
def test_a_load_that_is_offered_again_never_starts_upstream_because_it_would_have_to_fit_twice(version: str) -> None:
    seen = guards(version)["failed_loads"]["offered_again"]["unpatched"]
    assert seen == {"loads": 1, "tokens": 0, "free": True, "reservations_dropped": 0}


@pytest.mark.parametrize("version", VLLM_VERSIONS)
def test_with_the_patch_it_is_loaded_again_without_counting_twice(version: str) -> None:
    seen = guards(version)["failed_loads"]["offered_again"]["patched"]
    assert seen == {"loads": 2, "tokens": 4, "free": True, "reservations_dropped": 1}
