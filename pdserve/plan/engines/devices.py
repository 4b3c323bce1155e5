"""Which devices a process sees: exactly one variable is set, all others that could combine with it are unset.

ROCm reads ROCR_VISIBLE_DEVICES, HIP_VISIBLE_DEVICES, CUDA_VISIBLE_DEVICES and GPU_DEVICE_ORDINAL, and two of them
compose: the second filters what the first has left and renumbered, so that sites whose Slurm sets ROCR_VISIBLE_DEVICES
can end up with no device at all. vLLM on ROCm deprecates CUDA_VISIBLE_DEVICES (vllm#46636).

The ids of a Node are therefore those of the bare machine, not of a job's already filtered view.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

Platform = Literal["cpu", "cuda", "rocm"]

VARIABLE: dict[Platform, str] = {"cuda": "CUDA_VISIBLE_DEVICES", "rocm": "HIP_VISIBLE_DEVICES"}
"""The one variable of each platform. CPU has none."""

ALL_VARIABLES = ("CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


def device_env(platform: Platform, devices: Sequence[int]) -> tuple[dict[str, str], tuple[str, ...]]:
    """Variables to set and variables to unset. With no devices all are unset: CPU engines need none."""
    variable = VARIABLE.get(platform)
    setting = {variable: ",".join(str(device) for device in devices)} if variable and devices else {}
    return setting, tuple(name for name in ALL_VARIABLES if name not in setting)
