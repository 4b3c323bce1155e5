"""One device variable is set, all that could combine with it are unset."""

from __future__ import annotations

import pytest

from pdserve.plan.environment import DEVICE_VARIABLES, Platform, device_env


@pytest.mark.parametrize(("platform", "variable"), [("cuda", "CUDA_VISIBLE_DEVICES"), ("rocm", "HIP_VISIBLE_DEVICES")])
def test_a_platform_has_one_variable_and_the_others_are_unset(platform: Platform, variable: str) -> None:
    setting, unset = device_env(platform, (4, 5))
    assert setting == {variable: "4,5"}
    assert set(unset) == set(DEVICE_VARIABLES) - {variable}


def test_on_a_cpu_all_are_unset() -> None:
    assert device_env("cpu", ()) == ({}, DEVICE_VARIABLES)


def test_rocm_never_leaves_two_filters_that_compose() -> None:
    """ROCR filters and renumbers before HIP does: both together can hide every device."""
    setting, unset = device_env("rocm", (0,))
    assert "ROCR_VISIBLE_DEVICES" in unset
    assert "CUDA_VISIBLE_DEVICES" in unset
    assert not setting.keys() & set(unset)
