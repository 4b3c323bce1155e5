"""Hardware that `pdserve init` knows, and what the shipped recipes write for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from pdserve.recipe.base import FlagValue


@dataclass(frozen=True)
class Hardware:
    """One kind of node."""

    name: str
    platform: Literal["cuda", "rocm", "cpu"]
    device_gib: float
    """Memory of a device, GiB, as PyTorch has it, in whole ones that are surely there; 0 without devices."""
    devices: int
    """Of a usual node; 0 without devices."""
    transfer: Mapping[str, FlagValue]
    """The connector that moves KV from prefill to decode."""
    transfer_reason: str
    args: Mapping[str, tuple[FlagValue, str]] = field(default_factory=dict)
    """Flag -> value, reason."""
    env: Mapping[str, tuple[FlagValue, str]] = field(default_factory=dict)


_SHARE: Mapping[str, tuple[FlagValue, str]] = {
    "gpu-memory-utilization": (0.9, "as in the shipped recipes; the rest is for what vLLM does not count")
}
_READY: tuple[FlagValue, str] = (3600, "vLLM gives its own engine 600 s to load; keep it at timeouts.engine_seconds")


def _cuda(name: str, device_gib: float) -> Hardware:
    return Hardware(
        name,
        "cuda",
        device_gib,
        8,
        {"kind": "nixl"},
        "as in the shipped recipes for H200; moves KV of several groups too",
        _SHARE,
        {"VLLM_ENGINE_READY_TIMEOUT_S": _READY},
    )


def _rocm(name: str, device_gib: float) -> Hardware:
    return Hardware(
        name,
        "rocm",
        device_gib,
        8,
        {"kind": "mooncake", "protocol": "tcp"},
        "needs no RDMA device, but a Mooncake built for ROCm; try rdma where there are adapters",
        _SHARE,
        {"VLLM_ROCM_USE_AITER": (1, "AMD's kernels"), "VLLM_ENGINE_READY_TIMEOUT_S": _READY},
    )


_ALL = (
    # 288 GiB: rocm.docs.amd.com/en/latest/reference/gpu-specs.html. PyTorch: 287.98.
    _rocm("mi355x", 287),
    # 192 GiB: the same page. PyTorch: 191.69 to 191.98.
    _rocm("mi300x", 191),
    # SXM, 80 GB: www.nvidia.com/en-us/data-center/h100/. PyTorch: 79.14 to 79.25. (The NVL has 94 GB.)
    _cuda("h100", 79),
    # 141 GB: www.nvidia.com/en-us/data-center/h200/. PyTorch: 139.80.
    _cuda("h200", 139),
    # 180 GB: 1,440 GB of 8, docs.nvidia.com/dgx/dgxb200-user-guide/introduction-to-dgxb200.html. PyTorch: 178.35.
    _cuda("b200", 178),
    Hardware(
        "cpu",
        "cpu",
        0,
        0,
        {"kind": "mooncake", "protocol": "tcp"},
        "a machine without devices has TCP",
        {
            "enforce-eager": (True, "compiling takes longer than a trial"),
            "max-num-seqs": (16, "as in the shipped recipes for a CPU"),
        },
        {
            "VLLM_CPU_KVCACHE_SPACE": (1, "GiB of KV, whole numbers only; vLLM's own choice is sized for a big host"),
            "VLLM_CPU_OMP_THREADS_BIND": ("nobind", "by default every engine binds to the same cores"),
            "OMP_NUM_THREADS": (1, "two engines share this machine"),
            "VLLM_ENABLE_V1_MULTIPROCESSING": (0, "an engine with one rank needs no process for it: a faster start"),
        },
    ),
)
HARDWARE: Mapping[str, Hardware] = {hardware.name: hardware for hardware in _ALL}
"""Each device's memory has its vendor's figure beside it, and what PyTorch calls "total capacity" in public logs of it
(vLLM takes its share of that), which is 0.7 to 1.8 GiB less on NVIDIA. None was measured here: a recipe is right only
after `pdserve preflight` on the nodes."""
