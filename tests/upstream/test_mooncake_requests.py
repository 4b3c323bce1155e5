"""MooncakeConnector's scheduler half, real, with kv_transfer_params as a client or a broken router may send them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.upstream.mooncake import measured
from tests.upstream.run import VLLM_VERSIONS

pytestmark = [pytest.mark.upstream, pytest.mark.parametrize("version", VLLM_VERSIONS)]


def cases(version: str) -> dict[str, dict[str, Any]]:
    results: dict[str, dict[str, Any]] = measured(version)["parameters"]
    return results


def without(case: dict[str, Any]) -> set[str]:
    """What upstream does with it, however it ends."""
    return {unpatched for (unpatched, _), _ in case.values()}


def test_upstream_parks_requests_for_kv_that_no_prefill_was_asked_for(version: str) -> None:
    parked = {name for name, case in cases(version).items() if case["never"][0][0] == "waits"} - {"good: decode"}
    assert parked >= {
        "decode: only do_remote_prefill",
        "decode: no transfer_id",
        "decode: no remote_engine_id",
        "decode: no remote_bootstrap_addr",
        "decode: flag is text",
    }
    assert cases(version)["decode: no transfer_id"]["later"][0][0] == "holds blocks as WAITING_FOR_REMOTE_KVS"


def test_upstream_ends_engine_core(version: str) -> None:
    results = cases(version)
    assert "AssertionError" in without(results["decode: do_remote_decode"])
    assert "AssertionError" in without(results["prefill: do_remote_prefill"])
    assert results["decode: no remote_engine_id"]["waiting"][0][0] == "KeyError"
    assert "TypeError" in without(results["decode: remote_engine_id is a list"])
    assert "AttributeError" in without(results["decode: text"])


def test_with_the_patch_each_is_served_without_a_transfer_and_counted_once(version: str) -> None:
    bad = {name: case for name, case in cases(version).items() if not name.startswith("good")}
    assert len(bad) == 20
    for name, case in bad.items():
        for abort, (_, patched) in case.items():
            assert patched == ["served", 1], (name, abort)


def test_what_is_right_is_left_alone(version: str) -> None:
    good = {name: case for name, case in cases(version).items() if name.startswith("good")}
    assert len(good) == 4
    for name, case in good.items():
        for abort, (unpatched, patched) in case.items():
            assert unpatched == patched, (name, abort)


def test_a_prefill_that_ends_by_a_stop_token_delivers_its_kv(version: str) -> None:
    unpatched, patched = measured(version)["stopped_by_token"]
    assert unpatched == {"served": None, "equal": None, "prefill ended by": "stop"}
    assert patched["equal"]
    assert patched["prefill ended by"] == "stop", "its client is told how it ended"
