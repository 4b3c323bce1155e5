"""Which devices a job may use, in ids of the bare machine, whatever a batch system has set."""

from __future__ import annotations

import pytest

from pdserve.preflight.facts import visible_devices

EIGHT = tuple(range(8))


@pytest.mark.parametrize(
    ("platform", "setting", "left"),
    [
        ("cuda", {}, EIGHT),
        ("cuda", {"CUDA_VISIBLE_DEVICES": "4,5"}, (4, 5)),
        ("cuda", {"CUDA_VISIBLE_DEVICES": ""}, ()),
        ("cuda", {"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, ()),
        ("cuda", {"CUDA_VISIBLE_DEVICES": "6,9"}, (6,)),
        ("cuda", {"CUDA_VISIBLE_DEVICES": "GPU-ad466f2f"}, EIGHT),
        ("cuda", {"CUDA_VISIBLE_DEVICES": "4", "ROCR_VISIBLE_DEVICES": "1"}, (4,)),
        ("rocm", {}, EIGHT),
        ("rocm", {"ROCR_VISIBLE_DEVICES": "4,5"}, (4, 5)),
        ("rocm", {"HIP_VISIBLE_DEVICES": "2"}, (2,)),
        ("rocm", {"CUDA_VISIBLE_DEVICES": "3"}, (3,)),
        ("rocm", {"HIP_VISIBLE_DEVICES": "2", "CUDA_VISIBLE_DEVICES": "3"}, (2,)),
        ("rocm", {"ROCR_VISIBLE_DEVICES": "4,5", "CUDA_VISIBLE_DEVICES": "4,5", "GPU_DEVICE_ORDINAL": "4,5"}, (4, 5)),
        ("rocm", {"ROCR_VISIBLE_DEVICES": "4,5,6,7", "HIP_VISIBLE_DEVICES": "0,2"}, (4, 6)),
        ("rocm", {"ROCR_VISIBLE_DEVICES": "4,5", "HIP_VISIBLE_DEVICES": "1,2"}, (5,)),
        ("cpu", {"CUDA_VISIBLE_DEVICES": "0"}, ()),
    ],
)
def test_what_is_left(platform: str, setting: dict[str, str], left: tuple[int, ...]) -> None:
    assert visible_devices(platform, EIGHT, setting) == left


def test_without_a_driver_the_variables_are_believed() -> None:
    assert visible_devices("cuda", (), {"CUDA_VISIBLE_DEVICES": "0,1"}) == (0, 1)
    assert visible_devices("cuda", (), {}) == ()
