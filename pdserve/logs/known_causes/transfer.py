"""Mooncake, NIXL and the start of data parallelism."""

from __future__ import annotations

from pdserve.logs.known_causes.packages import MOONCAKE_FOR_CUDA, MOONCAKE_LIBRARIES
from pdserve.logs.known_causes.rule import ENGINES, Rule, rule

TRANSFER: tuple[Rule, ...] = (
    rule(
        r"ibv_reg_mr|[Mm]emory registration failed|Failed to register (?:local )?memory|memlock",
        "memory could not be registered for RDMA: locked memory is limited, or the NIC cannot reach this memory",
        "raise the limit (ulimit -l unlimited; container: --ulimit memlock=-1 --cap-add IPC_LOCK), check that the "
        "peer-memory module of the NIC is loaded, or use protocol: tcp on the mooncake connector",
    ),
    rule(
        r"Mooncake Transfer Engine initialization failed",
        "Mooncake could not open its transport: the NIC, or the address of this host, cannot be used",
        "use protocol: tcp on the mooncake connector (with MC_FORCE_TCP: 1), or give the container the devices "
        "(--device /dev/infiniband) and name them in device_name",
    ),
    rule(
        r"Mooncake is not available",
        "Mooncake's Python module cannot be imported: it is not installed, was built for another CUDA than torch, or "
        "lacks a system library",
        "pdserve preflight names which. Built for CUDA 12, beside vllm 0.26 and newer: "
        f"{MOONCAKE_FOR_CUDA}; libraries, on Debian: {MOONCAKE_LIBRARIES}",
    ),
    rule(
        r"NIXL is not available",
        "the NIXL library is not installed where the engine runs, or only its build for another CUDA",
        "python -c 'import torch, nixl' names it; pip install nixl (CUDA; ROCm images bring their own)",
    ),
    rule(
        r"Engine ID mismatch for dp_rank",
        "it registered with the bootstrap server of an earlier life of this prefill, which still runs",
        "stop what holds the bootstrap port (ports.bootstrap), then start it again",
    ),
    rule(
        r"Failed to register .{0,400}with the Mooncake bootstrap server at (?P<url>\S+) after",
        "the first rank of this prefill was not there yet at {url}: vLLM 0.31 and newer try it three times, for 3 s",
        "start it again: what is loaded once loads faster; or give each rank a server of its own (parallel."
        "load_balancing: external), use instances in place of ranks, or the connector nixl",
        ENGINES,
    ),
    rule(
        r"DP Coordinator process failed to report ZMQ addresses within timeout=(?P<seconds>\d+)",
        "the node was so busy that a helper of vLLM's data parallelism was not up after {seconds} s, which no setting "
        "changes",
        "start it again while the node does less",
        ENGINES,
    ),
)
