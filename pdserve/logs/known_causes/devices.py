"""Accelerators, and the ranks that talk to each other on them."""

from __future__ import annotations

from pdserve.logs.known_causes.rule import ENGINES, Rule, rule

_ASSERT = (
    "mostly it is an index out of bounds, as of a token that the model does not have; set CUDA_LAUNCH_BLOCKING: 1 in "
    "engine.env and enforce-eager: true in {args}: the traceback then names the kernel"
)
_RANKS = (
    "set NCCL_DEBUG: INFO in engine.env and try again; usual causes are a wrong NCCL_SOCKET_IFNAME, a small "
    "/dev/shm in a container (--shm-size 16g --ipc=host), or another rank that died first"
)

DEVICES: tuple[Rule, ...] = (
    # The driver
    rule(
        r"NVIDIA driver on your system is too old|CUDA driver version is insufficient",
        "the driver of this host is too old for the CUDA of torch or vllm",
        "update the driver (nvidia-smi has its version), or use an image or packages for an older CUDA",
    ),
    rule(
        r"system not yet initialized|cudaErrorSystemNotReady",
        "CUDA cannot use the devices yet (error 802): nvidia-fabricmanager does not run, or its version is not the "
        "driver's",
        "systemctl status nvidia-fabricmanager; its version must be that of the driver (nvidia-smi)",
    ),
    rule(
        r"unsupported display driver / cuda driver combination|cudaErrorSystemDriverMismatch",
        "libcuda does not fit the driver that runs (error 803): the driver was updated, or an image brings a libcuda "
        "of its own that this device does not take",
        "restart the host after an update; in a container leave /usr/local/cuda/compat out of LD_LIBRARY_PATH",
    ),
    # The devices
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
        r"no kernel image is available|hipErrorNoBinaryForGpu",
        "a package has no kernels for this device: it was built for other ones",
        "use an image or packages for it (nvidia-smi --query-gpu=compute_cap --format=csv; rocminfo), or build them "
        "from source (TORCH_CUDA_ARCH_LIST, PYTORCH_ROCM_ARCH)",
    ),
    rule(
        r"an illegal memory access|(?:cuda|hip)ErrorIllegalAddress|Memory access fault by GPU",
        "a kernel used memory of the device that is not its own (illegal memory access)",
        "set CUDA_LAUNCH_BLOCKING: 1 (ROCm: AMD_SERIALIZE_KERNEL: 3) in engine.env and enforce-eager: true in {args}: "
        "the traceback then names the kernel; another attention-backend or another vllm may not have it; dmesg shows a "
        "device that is broken (Xid, RAS)",
    ),
    rule(
        r"Assertion `(?P<what>[^`\n]+)` failed(?s:.*)device-side assert triggered",
        "a kernel refused what it was given (device-side assert): {what}",
        _ASSERT,
    ),
    rule(
        r"device-side assert triggered|(?:cuda|hip)ErrorAssert",
        "a kernel refused what it was given (device-side assert)",
        _ASSERT,
    ),
    # Ranks
    rule(
        r"Watchdog caught collective operation timeout: \w+\((?:[^)\n]*\bOpType=(?P<what>\w+))?",
        "a collective of the ranks ({what}) did not end in its time: another rank hangs, died, or waits elsewhere",
        "look for the first error in the logs of all ranks and nodes of the instance; py-spy dump --pid of a worker "
        "shows where, while it hangs",
        ENGINES,
    ),
    rule(
        r"Duplicate GPU detected ?: rank (?P<one>\d+) and rank (?P<other>\d+) both on (?:CUDA|HIP) device",
        "ranks {one} and {other} of an instance were given the same device",
        "give each rank a device of its own: {role}.devices, devices_per_node, or a smaller parallel.tp",
        ENGINES,
    ),
    rule(
        r"Bootstrap ?: no socket interface found",
        "NCCL finds no network interface: NCCL_SOCKET_IFNAME names none that this node has",
        "correct NCCL_SOCKET_IFNAME in engine.env; ip -br address lists the interfaces",
        ENGINES,
    ),
    rule(
        r"Unable to find address for: (?P<name>\S+)",
        "Gloo finds no network interface {name}, which GLOO_SOCKET_IFNAME names",
        "correct GLOO_SOCKET_IFNAME in engine.env; ip -br address lists the interfaces",
        ENGINES,
    ),
    rule(
        r"Timed out after (?P<seconds>\d+) seconds waiting for clients\. (?P<here>\d+)/(?P<all>\d+) clients joined",
        "only {here} of {all} ranks came together within {seconds} s",
        "look for the first error in the logs of the other ranks and nodes; where they have none, a firewall drops the "
        "port on which the first rank waits",
        ENGINES,
    ),
    rule(
        r"nccl\w*Error[^\n]*(?:\n[^\n]*)?\n[^\n]*Last error:\n"
        r"(?:\[rank\d+\]: |\([^)\n]*\) ERROR [^\]\n]*\] )?(?P<what>[^\n]+)",
        "the ranks of the instance could not talk to each other ({what})",
        _RANKS,
        ENGINES,
    ),
    rule(
        r"(?:NCCL|RCCL) error:? ?(?:in: [^,\n]*, )?(?P<what>[^\n]*)|nccl\w*Error",
        "the ranks of the instance could not talk to each other ({what})",
        _RANKS,
        ENGINES,
    ),
)
