"""What a plan for ROCm says about LMCache."""

from __future__ import annotations

from typing import Any

import pytest

from tests.plan.kit import hosts, on_gpus, plan, recipe, with_lmcache

HANG = "lmcache#4419; seen with"


def warned(*changes: dict[str, Any]) -> list[str]:
    return [warning for warning in plan(recipe(*changes), *hosts(8)).warnings if HANG in warning]


def test_lmcache_driven_on_rocm_comes_with_a_word_about_its_hang() -> None:
    (warning,) = warned(on_gpus(platform="rocm"), with_lmcache(transfer_mode="lmcache_driven"))
    assert warning.startswith("prefill: ")
    assert "engine_driven" in warning
    assert "LMCACHE_ROCM_HOST_EVENTS: 1" in warning
    assert "Not the change that the issue proposes" in warning
    assert "gfx950" in warning, "ROCm 7.2.3 is not safe on every device"


@pytest.mark.parametrize(
    "changes",
    [
        (on_gpus(platform="rocm"), with_lmcache(transfer_mode="engine_driven")),
        (on_gpus(platform="cuda"), with_lmcache(transfer_mode="lmcache_driven")),
        (with_lmcache(transfer_mode="lmcache_driven", on=["prefill"]), {"prefill": {"connector": {
            "kind": "multi", "of": [{"kind": "lmcache-mp"}, {"kind": "mooncake", "protocol": "tcp"}]}}}),
        (on_gpus(platform="rocm"),),
    ],
)  # fmt: skip
def test_no_other_platform_or_mode_is_warned_of_it(changes: tuple[dict[str, Any], ...]) -> None:
    assert warned(*changes) == []


def test_host_events_that_are_on_are_a_warning() -> None:
    changes = (
        on_gpus(platform="rocm"),
        with_lmcache(transfer_mode="lmcache_driven", env={"LMCACHE_ROCM_HOST_EVENTS": "1"}),
    )
    assert warned(*changes) == []
    (warning,) = (
        warning
        for warning in plan(recipe(*changes), *hosts(8)).warnings
        if "lmcache#4419" in warning and "is on" in warning
    )
    assert "by simulation only" in warning
