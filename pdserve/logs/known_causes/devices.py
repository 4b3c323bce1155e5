"""Accelerators, and the ranks that talk to each other on them."""

from __future__ import annotations

from pdserve.logs.known_causes.rule import ENGINES, Rule, rule

DEVICES: tuple[Rule, ...] = (
    rule(
        r"Failed to infer device type|No (?:CUDA|HIP) GPUs are available|no ROCm-capable device",
        "the engine sees no device",
        "check nvidia-smi or rocm-smi as this user, the container's devices (--gpus all; --device /dev/kfd "
        "--device /dev/dri), and `platform` in the recipe",
        ENGINES,
    ),
    rule(
        r"invalid device ordinal",
        "the engine was given a device that this host does not have",
        "correct {role}.devices, or devices_per_node",
        ENGINES,
    ),
    rule(
        r"(?:NCCL|RCCL) error:? ?(?P<what>[^\n]*)|nccl\w*Error",
        "the ranks of the instance could not talk to each other ({what})",
        "set NCCL_DEBUG: INFO in engine.env and try again; usual causes are a wrong NCCL_SOCKET_IFNAME, a small "
        "/dev/shm in a container (--shm-size 16g --ipc=host), or another rank that died first",
        ENGINES,
    ),
)
