"""Which of a machine's devices this job may use, in the ids of the bare machine.

A batch system narrows a job down by variables, and not all by the same ones: Slurm sets CUDA_VISIBLE_DEVICES, on sites
without NVIDIA's autodetection ROCR_VISIBLE_DEVICES and GPU_DEVICE_ORDINAL beside it with the same ids. The plan's ids
are those of the bare machine (plan/environment.py), because a process gets one variable and loses the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pdserve.plan.environment import DEVICE_VARIABLES

_NONE = ("", "-1", "NoDevFiles", "none", "void")


def variables(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of the environment that make devices visible."""
    return {name: environ[name] for name in DEVICE_VARIABLES if name in environ}


def visible(platform: str, present: Sequence[int], setting: Mapping[str, str]) -> tuple[int, ...]:
    """The ids that remain of `present` under these variables.

    Where the driver shows no device at all the variables count as right. An entry that is
    no number (a UUID) is not compared here and hides nothing.
    """
    if platform == "cpu":
        return ()
    if platform == "rocm":
        first, second = _ids(setting.get("ROCR_VISIBLE_DEVICES")), _ids(_hip(setting))
        allowed = _composed(first, second)
    else:
        allowed = _ids(setting.get("CUDA_VISIBLE_DEVICES"))
    if allowed is None:
        return tuple(present)
    return tuple(device for device in allowed if device in present) if present else allowed


def _hip(setting: Mapping[str, str]) -> str | None:
    """HIP's runtime reads the CUDA name where its own is not set."""
    return setting.get("HIP_VISIBLE_DEVICES", setting.get("CUDA_VISIBLE_DEVICES"))


def _composed(first: tuple[int, ...] | None, second: tuple[int, ...] | None) -> tuple[int, ...] | None:
    """ROCm numbers anew what ROCR_VISIBLE_DEVICES has left, and the second variable counts in those numbers. The same
    list in both is a batch system's, which means the bare machine's ids twice."""
    if first is None or second is None or first == second:
        return second if first is None else first
    return tuple(first[index] for index in second if index < len(first))


def _ids(text: str | None) -> tuple[int, ...] | None:
    """None: not set, or nothing that can be understood."""
    if text is None:
        return None
    if text.strip() in _NONE:
        return ()
    words = [word.strip() for word in text.split(",")]
    return tuple(dict.fromkeys(int(word) for word in words)) if all(word.isdigit() for word in words) else None
